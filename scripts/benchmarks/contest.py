"""Measure contenders at several shapes; make the tables that such axes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from scripts.benchmarks import corpus
from scripts.benchmarks.contender import Contender, Shape, check
from scripts.benchmarks.measure import Rounds, measure_once
from scripts.benchmarks.report import Options
from scripts.benchmarks.servers import Server, checked_out, serving, trusted_certificate

SHAPES = (Shape(rows=64, length=1025), Shape(rows=512, length=2049))
QUICK_SHAPES = (Shape(rows=16, length=129), Shape(rows=32, length=257))
NUM_TOKENS, QUICK_TOKENS = 10**9, 200_000

NOW, BEFORE, PLAIN, UNCHECKED = "ours", "before", "ours, without TLS", ", checksum off"

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
def now_and_before(options: Options, path: Path) -> Iterator[dict[str, Server]]:
    """Serve a corpus from this tree, with `--before` from that commit's, with `--tls` also without TLS."""
    with ExitStack() as stack:
        certificate = stack.enter_context(trusted_certificate()) if options.tls else None
        serve = partial(serving, {corpus.NAME: path})
        servers = {NOW: stack.enter_context(serve(certificate=certificate))}
        if options.before is not None:
            tree = stack.enter_context(checked_out(options.before))
            servers[BEFORE] = stack.enter_context(serve(tree=tree, certificate=certificate))
        if options.tls:
            servers[PLAIN] = stack.enter_context(serve())
        yield servers


def with_and_without_checksum(
    make: Callable[..., Contender], servers: Mapping[str, Server], shape: Shape, path: Path
) -> list[Maker]:
    """Return what connects our client to every server, with checksums and without."""
    return [
        partial(make, name + suffix, server, shape, path, verify=not suffix)
        for name, server in servers.items()
        for suffix in ("", UNCHECKED)
    ]


def compared(rounds: Rounds) -> list[tuple[str, str]]:
    """Return the pairs of our servers that a table compares, as far as they were measured."""
    pairs = [(NOW, PLAIN), (NOW, BEFORE), (NOW + UNCHECKED, BEFORE + UNCHECKED)]
    return [pair for pair in pairs if pair[1] in rounds.values]


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
