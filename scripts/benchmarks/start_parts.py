"""Where the time goes until something answers; each part timed in a fresh process.

`python -m scripts.benchmarks.start_parts loader JSON` makes a loader and takes a batch;
`python -m scripts.benchmarks.start_parts server PATH` does what `corpus-server serve` does, up to listening.
Both print seconds by the name of a part.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.processes import ROOT


def loader_parts(url: str, **plan: object) -> dict[str, float]:
    """Seconds of a training process's first steps with a loader; `again` is the same with another seed.

    Args:
        url: of a running server.
        plan: `corpus`, `seq_len`, `global_batch_size`, `seed`.
    """
    return _in_new_process("loader", json.dumps({"urls": url, **plan}))


def server_parts(path: Path) -> dict[str, float]:
    """Seconds of a server's steps until it listens."""
    return _in_new_process("server", str(path))


def _in_new_process(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "scripts.benchmarks.start_parts", *arguments]
    began = time.time()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:])} failed; it says why above")
    parts: dict[str, float] = json.loads(done.stdout)
    return {"interpreter": parts.pop("main_at") - began, **parts}


class _Clock:
    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.parts[name] = now - self._last
        self._last = now


def _loader(arguments: dict[str, object]) -> dict[str, float]:
    clock = _Clock()
    import torch  # noqa: F401

    clock.lap("import torch")
    from corpus_client import CorpusLoader

    clock.lap("import the client")
    seed = int(str(arguments.pop("seed")))
    for suffix in ("", ", again"):
        loader = CorpusLoader(device="cpu", seed=seed, **arguments)  # type: ignore[arg-type]
        clock.lap("CorpusLoader(...)" + suffix)
        batch = next(loader)
        clock.lap("first batch" + suffix)
        if batch.step != 0 or batch.inputs.shape[0] != arguments["global_batch_size"]:
            raise SystemExit(f"the first batch was of step {batch.step} with {batch.inputs.shape[0]} rows")
        loader.close()
        clock.lap("close" + suffix)
        seed += 1
    return clock.parts


def _server(path: Path) -> dict[str, float]:
    clock = _Clock()
    import corpus_server.cli  # noqa: F401

    clock.lap("import the command line")
    from corpus_server.catalog import Catalog
    from corpus_server.settings import CorpusSpec, Settings

    with tempfile.TemporaryDirectory() as state_dir:
        spec = CorpusSpec.parse(f"bench={path}", dtype="uint16")
        settings = Settings(corpora=(spec,), state_dir=Path(state_dir))
        Catalog.open(settings.corpora).close()
        clock.lap("open the corpus, to check it")
        from corpus_server.web.app import create_app

        clock.lap("import the web application")
        create_app(settings)
        clock.lap("make the application")
        Catalog.open(settings.corpora).close()
        clock.lap("open the corpus, to serve it")
    return clock.parts


if __name__ == "__main__":
    main_at = time.time()
    kind, argument = sys.argv[1:]
    parts = _loader(json.loads(argument)) if kind == "loader" else _server(Path(argument))
    print(json.dumps({"main_at": main_at, **parts}))
