"""The cells of docs/start/notebook.md run in a kernel, and its server ends with it however that ends."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.serving import ROOT, wait_until

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed here")
pytest.importorskip("ipykernel", reason="ipykernel is not installed here")
nbformat = pytest.importorskip("nbformat")

PAGE = (ROOT / "docs" / "start" / "notebook.md").read_text()
_CELL = re.search(r"^    from corpus_client import .*?(?=^\S)", PAGE, re.MULTILINE | re.DOTALL)
LOADER = re.sub("^    ", "", _CELL[0] if _CELL else "", flags=re.MULTILINE)


class Kernel:
    """A kernel in which cells run."""

    def __init__(self, client: Any, folder: Path) -> None:
        self._client, self._folder = client, folder

    def run(self, source: str) -> str:
        """Run a cell; return what it printed, without stderr, and what its last line is worth."""
        cell = nbformat.v4.new_code_cell(source)
        self._client.nb.cells = [cell]
        self._client.execute_cell(cell, 0)
        said = (each for each in cell.outputs if each.get("name") != "stderr")
        return "".join(each.get("text") or each.get("data", {}).get("text/plain", "") for each in said)

    def servers(self) -> list[int]:
        """Return the servers of loaders that were started in it."""
        found = []
        for each in psutil.process_iter():
            with suppress(psutil.Error):
                words = each.cmdline()
                if "--while-locked" in words and any(str(self._folder) in word for word in words):
                    found.append(each.pid)
        return found

    def check_no_server(self) -> None:
        wait_until(lambda: not self.servers(), "a server is left", 60)


@contextmanager
def running(folder: Path) -> Iterator[Kernel]:
    program = folder / "bin" / "corpus-server"  # .venv-integrations sees the package, and has no program
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m corpus_server "$@"\n')
    program.chmod(0o755)
    (folder / "runtime").mkdir(mode=0o700)
    environment = {
        **os.environ,
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(folder / "runtime"),
        "XDG_STATE_HOME": str(folder / "state"),
        "JUPYTER_RUNTIME_DIR": str(folder / "jupyter"),
    }
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(),
        kernel_name="python3",
        timeout=300,
        resources={"metadata": {"path": str(folder)}},
    )
    with client.setup_kernel(env=environment, cwd=str(folder)):
        yield Kernel(client, folder)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    (tmp_path / "corpus" / "train").mkdir(parents=True)
    np.save(tmp_path / "corpus" / "train" / "000000.npy", np.arange(100_000, dtype=np.uint16))
    with running(tmp_path) as found:
        yield found
    found.check_no_server()


def test_the_cells_of_the_page(kernel: Kernel) -> None:
    said = kernel.run(LOADER)
    assert "CorpusLoader(plan" in said
    assert "torch.Size([32, 256])" in said
    assert kernel.run("print(next(loader).step, loader.peek(81204).step)") == "1 81204\n"
    (server,) = kernel.servers()
    kernel.run(f"first = loader\n{LOADER}")  # the cell again
    assert kernel.servers() == [server], "both loaders share it"
    kernel.run("first.close()")
    assert kernel.servers() == [server]
    kernel.run("loader.close()")
    kernel.check_no_server()


def test_an_interrupted_cell_loses_no_step(kernel: Kernel) -> None:
    kernel.run(LOADER)
    said = kernel.run(
        "import signal, threading\n"
        "stopped = threading.Event()\n"
        "def interrupt():\n"
        # One that comes in a destructor is only printed.
        "    while not stopped.wait(1.0): signal.raise_signal(signal.SIGINT)\n"
        "threading.Thread(target=interrupt).start()\n"
        "seen = [0]\n"
        "try:\n"
        "    for batch in loader: seen.append(batch.step)\n"
        "except KeyboardInterrupt:\n"
        "    stopped.set()\n"
        "seen.append(next(loader).step)\n"
        "print(sorted(set(range(seen[-1])) - set(seen)), seen[-1])"
    )
    missing, last = re.fullmatch(r"\[(\d*)\] (\d+)\n", said).groups()  # type: ignore[union-attr]
    # The interrupt may fall between the loader and the list.
    assert missing in ("", str(int(last) - 1)), said


@pytest.mark.parametrize("way", ["killed", "restarted"])
def test_no_server_outlives_a_kernel(kernel: Kernel, way: str) -> None:
    kernel.run(LOADER)
    assert len(kernel.servers()) == 1
    if way == "killed":
        os.kill(int(kernel.run("import os; print(os.getpid())")), signal.SIGKILL)
    else:
        manager = kernel._client.km
        nbclient.util.run_sync(manager.restart_kernel)(now=True)
    kernel.check_no_server()
