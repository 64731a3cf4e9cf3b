"""The client on systems that lack what Linux has: each name is taken away, and the batches stay the same.

That is as near to Windows and macOS as Linux comes: there the workflow `tests` runs the client's tests.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import select
import selectors
import socket
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corpus_client import CorpusLoader, Staging, errors
from corpus_client.network.transport import first_arrived
from corpus_client.staging.slots import host_memory_bytes
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step
from tests.client.reference_server import ReferenceServer

PLAN: dict[str, Any] = {"corpus": "web", "seq_len": 16, "global_batch_size": 8, "seed": 3, "device": "cpu"}
MEMORY = 8 << 30

ABSENT: dict[str, tuple[Any, str]] = {
    "Unix sockets": (socket, "AF_UNIX"),
    "poll": (select, "poll"),
    "a selector with poll": (selectors, "PollSelector"),
    "sysconf": (os, "sysconf"),
    "private maps": (mmap, "MAP_PRIVATE"),
    "advice to maps": (mmap, "MADV_RANDOM"),
    "affinity": (os, "sched_getaffinity"),
    "fork": (os, "fork"),
}
"""Names by what they are for. Windows has none of them; macOS has all but the affinity."""


def global_memory_status(status: Any) -> int:
    """Do what Windows' GlobalMemoryStatusEx does with the first fields of its structure."""
    assert status[0] == ctypes.sizeof(status), "dwLength, the first four bytes"
    status[1] = MEMORY
    return 1


@pytest.fixture
def local_root(corpus: ReferenceCorpus, tmp_path: Path) -> Path:
    corpus.write(tmp_path)
    return tmp_path


@pytest.fixture
def _windows_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = SimpleNamespace(GlobalMemoryStatusEx=global_memory_status)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel), raising=False)


@pytest.mark.usefixtures("_windows_memory")
@pytest.mark.parametrize("absent", ABSENT)
def test_batches_are_the_same_without(
    absent: str,
    server: ReferenceServer,
    corpus: ReferenceCorpus,
    local_root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(*ABSENT[absent])
    for staging in (Staging(), Staging(local_root=local_root)):
        with CorpusLoader(server.url, staging=staging, num_steps=4, **PLAN) as loader:
            for batch in loader:
                expected = tokens_of_step(corpus, loader.plan, batch.step)
                assert batch.tokens.tolist() == expected.tolist()


@pytest.mark.usefixtures("_windows_memory")
def test_memory_is_what_windows_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf")
    assert 0 < host_memory_bytes() <= MEMORY


def test_a_unix_socket_is_refused_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    with pytest.raises(errors.InvalidArgument, match="http://host:port"):
        CorpusLoader("uds:///run/corpus.sock", **PLAN)


@pytest.mark.parametrize("absent", [None, "a selector with poll"])
def test_the_connection_on_which_something_came_is_found(
    absent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if absent is not None:
        monkeypatch.delattr(*ABSENT[absent])
    pairs = [socket.socketpair() for _ in range(3)]
    with ExitStack() as stack:
        for each in itertools.chain.from_iterable(pairs):
            stack.enter_context(each)
        connections: list[Any] = [SimpleNamespace(_holds_some=False, _open_socket=here) for here, _ in pairs]
        assert first_arrived(connections, 0.0) is None
        pairs[1][1].sendall(b"x")
        assert first_arrived(connections, 60.0) is connections[1]


WINDOWS = """
    import ctypes, json, mmap, os, select, selectors, socket, sys, types
    import asyncio, httpx, numpy, ssl, subprocess, tempfile, torch, torch.utils.data, xxhash
    for module, name in {absent!r}:
        vars(sys.modules[module]).pop(name, None)
    for name in [name for name in vars(os) if name.startswith(("getuid", "fork", "register_at_fork"))]:
        vars(os).pop(name)
    for name in ("fcntl", "resource", "pwd", "grp", "termios"):
        sys.modules[name] = None
    sys.platform = "win32"

    def status(fields):
        fields[1] = {memory}
        return 1

    ctypes.windll = types.SimpleNamespace(kernel32=types.SimpleNamespace(GlobalMemoryStatusEx=status))
    from corpus_client import CorpusLoader, Staging, errors
    from corpus_client.tools.machine import num_cores

    seen = []
    for staging in (Staging(), Staging(local_root={local_root!r})):
        with CorpusLoader({url!r}, num_steps=4, staging=staging, **{plan!r}) as loader:
            seen.append([batch.tokens.tolist() for batch in loader])
            plan = loader.plan
    try:
        CorpusLoader({local_root!r}, **{plan!r})
    except errors.InvalidArgument as error:
        said = str(error)
    print(json.dumps({{"plan": plan, "seen": seen, "said": said, "cores": num_cores()}}))
"""


def test_all_of_it_is_missing_at_once_as_on_windows(
    server: ReferenceServer, corpus: ReferenceCorpus, local_root: Path
) -> None:
    absent = [(module.__name__, name) for module, name in ABSENT.values()]
    code = textwrap.dedent(WINDOWS).format(
        absent=absent, memory=MEMORY, local_root=str(local_root), url=server.url, plan=PLAN
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = [tokens_of_step(corpus, found["plan"], step).tolist() for step in range(4)]
    assert found["seen"] == [expected, expected]
    assert "corpus-server runs on Linux alone" in found["said"]
    assert "give the URL of a server" in found["said"]
    assert found["cores"] >= 1
