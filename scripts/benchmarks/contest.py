"""Measure contenders at several shapes; make the tables that such axes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from scripts.benchmarks import corpus
from scripts.benchmarks.checkout import checked_out
from scripts.benchmarks.contender import Contender, Shape, check
from scripts.benchmarks.measure import Rounds, measure_once
from scripts.benchmarks.report import Options
from scripts.benchmarks.servers import Server, serving

SHAPES = (Shape(rows=64, length=1025), Shape(rows=512, length=2049))
QUICK_SHAPES = (Shape(rows=16, length=129), Shape(rows=32, length=257))
NUM_TOKENS, QUICK_TOKENS = 10**9, 200_000

NOW, BEFORE, UNCHECKED = "ours", "before", ", checksum off"

Maker = Callable[[], Contender]
"""Connects a contender."""


def resident_corpus(options: Options) -> Path:
    """Return the bench's corpus; it lies in the page cache."""
    path = corpus.make(options.cache, QUICK_TOKENS if options.quick else NUM_TOKENS)
    corpus.warm(path)
    return path


def shapes_of(options: Options) -> tuple[Shape, Shape]:
    """Return the small and the large batch."""
    return QUICK_SHAPES if options.quick else SHAPES


@contextmanager
def now_and_before(
    options: Options, path: Path, certificate: Path | None = None
) -> Iterator[dict[str, Server]]:
    """Serve a corpus from this tree and, with `--before`, from that commit's tree.

    Args:
        certificate: serve by https, see `serving`.
    """
    serve = partial(serving, {corpus.NAME: path}, certificate=certificate)
    with ExitStack() as stack:
        servers = {NOW: stack.enter_context(serve())}
        if options.before is not None:
            servers[BEFORE] = stack.enter_context(
                serve(tree=stack.enter_context(checked_out(options.before)))
            )
        yield servers


def ours_with_and_without_checksum(
    make: Callable[..., Contender], servers: Mapping[str, Server], shape: Shape, path: Path
) -> list[Maker]:
    """Return what connects our client to every server, with checksums and without."""
    return [
        maker
        for name, server in servers.items()
        for maker in (
            partial(make, name, server, shape, path),
            partial(make, name + UNCHECKED, server, shape, path, verify=False),
        )
    ]


def contest(rounds: Rounds, shape: Shape, path: Path, options: Options, makers: Sequence[Maker]) -> Rounds:
    """Connect contenders, compare their first batches with the corpus, and measure them in turn."""
    with ExitStack() as stack:
        everybody: dict[str, Contender] = {}
        for make in makers:
            contender = make()
            stack.callback(contender.close)
            check(contender, path, shape)
            everybody[contender.name] = contender
        corpus.warm(path)
        for number in range(options.rounds):
            # The other way round every second time: whoever follows a heavy contender has a disadvantage.
            for name in everybody if number % 2 == 0 else reversed(everybody):
                rounds.add(name, measure_once(everybody[name], shape, options.seconds))
    return rounds
