"""Start the server with an optimisation taken away: `python -P without.py TRICK serve ...`.

The product has no switches for its optimisations. This program patches one away before the server's command
line runs, and again in each worker process, so that `scripts/bench tricks` can measure each one off against
on. It imports `corpus_server` alone.

To add a trick, add a line to `TRICKS`: its name and what takes it away.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

VARIABLE = "BENCH_WITHOUT"
"""Environment variable that tells worker processes which trick to take away."""

KIB = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Trick:
    """Name an optimisation and say how to take it away.

    Args:
        patch: takes it away in this process; None: `settings` do.
        settings: keys of `[server]` in the configuration file that take it away.
        uds: measure over a Unix-domain socket.
    """

    name: str
    patch: Callable[[], None] | None = None
    settings: Mapping[str, int] = field(default_factory=dict)
    uds: bool = False


def replace(target: str, value: Any) -> Callable[[], None]:
    """Return what sets `module:attribute` to a value, also where other modules imported it by name.

    The patch ends the process if the attribute is gone: otherwise a renamed optimisation would be compared
    with itself.
    """

    def patch() -> None:
        module, _, path = target.partition(":")
        *parents, name = path.split(".")
        try:
            owner: Any = importlib.import_module(module)
            for parent in parents:
                owner = getattr(owner, parent)
            old = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise SystemExit(
                f"expected an optimisation at {target}, got {error}; move or delete its trick in {__file__}"
            ) from error
        setattr(owner, name, value)
        if not parents:
            for each in list(sys.modules.values()):
                if each.__name__.startswith("corpus_server.") and vars(each).get(name) is old:
                    setattr(each, name, value)

    return patch


TRICKS = (
    Trick(
        name="small steps located together",
        patch=replace(
            "corpus_server.read.reading:select",
            lambda *asked, **how: (
                importlib.import_module("corpus_server.read.reading").select_alone(*asked, **how),
                0,
            ),
        ),
    ),
    Trick(name="reading ahead by plan", settings={"read_ahead_bytes": 0}),
    *(
        Trick(
            name=f"pieces of 896 KiB, not {size:,} KiB",
            patch=replace("corpus_server.read.reading:PIECE_BYTES", size * KIB),
        )
        for size in (256, 512, 1024, 2048)
    ),
    *(
        Trick(
            name=f"4,096 rows located at a time, not {rows:,}",
            patch=replace("corpus_server.read.reading:MAX_LOCATED_ROWS", rows),
        )
        for rows in (256, 65_536)
    ),
    Trick(
        name="wide Unix socket buffer",
        patch=replace("corpus_server.http.exchange:widen", lambda connection: None),
        uds=True,
    ),
    *(Trick(name=f"4 threads, not {number}", settings={"gather_threads": number}) for number in (1, 2)),
)


def main() -> None:
    """Take the named trick away and run the rest of the command line, or a worker of the supervisor."""
    is_worker = VARIABLE in os.environ
    if not is_worker:
        os.environ[VARIABLE] = sys.argv.pop(1)
    patches = {trick.name: trick.patch for trick in TRICKS if trick.patch}
    patches[os.environ[VARIABLE]]()
    if is_worker:
        importlib.import_module("corpus_server.run.worker").main()
        return
    # Workers are new interpreters: they start here too, and are patched before they import the server.
    replace("corpus_server.run.process:WORKER_MODULE", "scripts.benchmarks.without")()
    importlib.import_module("corpus_server.cli").main()


if __name__ == "__main__":
    main()
