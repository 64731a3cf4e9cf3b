"""A loader that is given a path: its server is shared, started again after a kill, gone with the last."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import xxhash
from torch.utils.data import DataLoader

from corpus_client import (
    ArrayLoader,
    CorpusIterableDataset,
    CorpusLoader,
    Network,
    RemoteCorpus,
    Staging,
    errors,
    get_batch,
)
from tests.conftest import ServedCorpus
from tests.contract.conftest import make_loader, take
from tests.contract.ranks import GLOBAL_BATCH_SIZE, PLAN, SEQ_LEN
from tests.corpora import write_raw
from tests.serving import ROOT, RunningServer, environment, wait_until
from tests.views import write_corpus, write_view

NUM_KILLS = int(os.environ.get("CORPUS_KILLS", "2"))
"""Of each kind of process."""

WORLD_SIZE = 3
Corpora = dict[str, ServedCorpus]


class Runtime:
    """The folder in which servers of paths lie, and the processes that know of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def processes(self, word: str = "") -> list[psutil.Process]:
        """Return the processes that were started with this folder and whose command has a word."""
        found, mark = [], f"XDG_RUNTIME_DIR={self.folder}\0".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(psutil.Error, OSError):
                if mark in path.read_bytes() and (pid := int(path.parent.name)) != os.getpid():
                    each = psutil.Process(pid)
                    command = " ".join([each.name(), *each.cmdline()])
                    if "resource_tracker" not in command and word in command:
                        found.append(each)
        return found

    def servers(self) -> list[int]:
        """Return the supervisors."""
        return [each.pid for each in self.processes("while-locked") if each.name() != "corpus-worker"]

    def check_nothing_left(self) -> None:
        """Wait until no process and no socket is left, and no child of this one is a zombie."""

        def left() -> list[Any]:
            zombies = []
            for each in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    zombies += [each] if each.status() == psutil.STATUS_ZOMBIE else []
            return [*self.processes(), *self.folder.rglob("socket"), *zombies]

        wait_until(lambda: not left(), lambda: f"left: {left()}", 60)


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    with TemporaryDirectory(prefix="run-") as folder, TemporaryDirectory() as state:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setenv("XDG_STATE_HOME", state)
        runtime = Runtime(Path(folder))
        yield runtime
        runtime.check_nothing_left()


@pytest.mark.parametrize("order", ["shuffle", "random"])
def test_the_same_batches_and_the_same_state_as_from_a_url(
    corpora: Corpora, replicas: Mapping[str, list[str]], order: str
) -> None:
    with (
        make_loader(corpora["web"].path, corpus=None, order=order, num_steps=60) as here,
        make_loader(replicas["1 worker"], order=order, num_steps=60) as there,
    ):
        for (step, tokens), (expected_step, expected) in zip(take(here, 60), take(there, 60), strict=True):
            assert step == expected_step
            np.testing.assert_array_equal(tokens, expected)
        assert here.state_dict() == there.state_dict()
        # Tokens come from the files.
        assert 0 < here.stats().received_bytes < there.stats().received_bytes


def test_several_corpora_by_name(corpora: Corpora, replicas: Mapping[str, list[str]], tmp_path: Path) -> None:
    """A mapping, or a configuration file, whose paths are relative to the file."""
    stage = {"from_step": 0, "global_batch_size": 24, "mixture": {"web": 0.5, "mixed": 0.5}}
    plan = {"seq_len": 16, "seed": 3, "order": "shuffle", "stages": [stage]}
    paths = {name: corpora[name].path for name in ("web", "mixed")}
    tables = [
        f'[corpora.{name}]\npath = "{os.path.relpath(path, tmp_path)}"\n' for name, path in paths.items()
    ]
    (tmp_path / "corpus.toml").write_text("".join(tables))
    options: dict[str, Any] = {"corpus": None, "seq_len": None, "global_batch_size": None, "seed": 0}
    with make_loader(replicas["1 worker"], plan=plan, **options) as there:
        expected = take(there, 40)
        for source in (paths, {name: str(path) for name, path in paths.items()}, tmp_path / "corpus.toml"):
            with make_loader(source, plan=plan, **options) as here:
                assert here.plan_id == there.plan_id
                for (_, ours), (_, theirs) in zip(take(here, 40), expected, strict=True):
                    np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(
        errors.InvalidArgument, match=r"corpus must be one of (web, mixed|mixed, web), or give weights"
    ):
        make_loader(paths, corpus=None)


def test_a_relative_path_a_pattern_and_a_name_with_special_characters(
    corpora: Corpora, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = corpora["web"].tokens
    (tmp_path / "in").mkdir()
    tokens.tofile(tmp_path / "in" / "a,b#1=[x].bin")
    monkeypatch.chdir(tmp_path)
    for source in (Path("in/a,b#1=[x].bin"), tmp_path / "in" / "a,b#1=[x].bin", "./in", "in/*.bin", "w=in"):
        with make_loader(source, corpus=None, order="sequential") as loader:
            np.testing.assert_array_equal(next(loader).tokens[0].numpy(), tokens[:17])


def test_rows_of_documents_and_options_of_a_corpus(corpora: Corpora) -> None:
    source = f"{corpora['docs'].path.with_suffix('')},eot=99"
    with make_loader(source, corpus=None, seq_len=4, global_batch_size=1, rows="documents") as loader:
        assert loader.sources == ("docs",)
        assert {10, 20, 30} & set(next(loader).inputs.flatten().tolist())


def test_a_view_is_read_through_the_server(tmp_path: Path) -> None:
    """Its rows lie in shards of its corpus, whose places the server resolves."""
    web = write_corpus(tmp_path / "web", [[30] * 50, [40] * 50])
    hq = write_view(web, [n % 3 for n in range(100)], tmp_path / "hq.view")
    source = {"web": f"{web},dtype=uint32", "hq": f"web?view={hq}"}
    with (
        RunningServer(source, tmp_path) as server,
        make_loader(server.url, corpus="hq") as there,
        make_loader(source, corpus="hq") as here,
    ):
        for (_, ours), (_, theirs) in zip(take(here, 10), take(there, 10), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_loader_that_cannot_be_made_leaves_no_server(corpora: Corpora, runtime: Runtime) -> None:
    with pytest.raises(errors.ServerError) as caught:
        make_loader(corpora["web"].path, corpus=None, seq_len=10**6)
    runtime.check_nothing_left()
    assert caught.tb is not None  # which keeps the loader


def test_loaders_of_other_kinds_take_a_path(corpora: Corpora, replicas: Mapping[str, list[str]]) -> None:
    path = corpora["web"].path
    plan = {"seq_len": 16, "global_batch_size": 24, "seed": 7}
    with (
        ArrayLoader(path, **plan, rank=0, world_size=1) as here,
        ArrayLoader(replicas["1 worker"], corpus="web", **plan, rank=0, world_size=1) as there,
    ):
        for (ours, _), (theirs, _), _ in zip(here, there, range(20), strict=False):
            np.testing.assert_array_equal(ours, theirs)
    drawn = []
    for source in (path, replicas["1 worker"][0]):
        with contextlib.closing(RemoteCorpus(source, "web")) as remote:
            torch.manual_seed(3)
            drawn.append(get_batch(remote, 4, 16)[0])
    assert torch.equal(*drawn)


def test_loaders_of_a_path_share_a_server_that_ends_with_the_last(corpora: Corpora, runtime: Runtime) -> None:
    path = corpora["web"].path
    with make_loader(path, corpus=None) as train:
        with make_loader(str(path), corpus=None, order="sequential") as evaluation:
            next(train), next(evaluation)
            (pid,) = runtime.servers()
        next(train)
        assert runtime.servers() == [pid]
        assert train.peek(5).step == 5
    runtime.check_nothing_left()
    assert train.peek(6).step == 6  # of a closed loader: a server for this one question
    runtime.check_nothing_left()


def test_a_dropped_loader_lets_its_server_end(corpora: Corpora, runtime: Runtime) -> None:
    loader = make_loader(corpora["web"].path, corpus=None)
    next(loader)
    del loader
    runtime.check_nothing_left()


def test_plans_are_found_again_in_the_state_folder(corpora: Corpora) -> None:
    with make_loader(corpora["web"].path, corpus=None) as loader:
        plan_id = loader.plan_id
    (state,) = Path(os.environ["XDG_STATE_HOME"], "corpus-server").iterdir()
    command = [sys.executable, "-m", "corpus_server", "plans", "list", "--state-dir", str(state)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert plan_id[:12] in done.stdout


@pytest.mark.parametrize(("method", "num_workers"), [("fork", 2), ("spawn", 1)])
def test_under_a_dataloader(
    corpora: Corpora, replicas: Mapping[str, list[str]], method: str, num_workers: int
) -> None:
    dataset = CorpusIterableDataset(
        corpora["web"].path, **{**PLAN, "global_batch_size": 24}, dtype=None, num_steps=12
    )
    batches = DataLoader(dataset, batch_size=None, num_workers=num_workers, multiprocessing_context=method)
    found = [(batch.step, batch.tokens.numpy().copy()) for batch in batches]
    del dataset, batches
    with make_loader(replicas["1 worker"], dtype=None, num_steps=12) as there:
        for (step, tokens), (expected_step, expected) in zip(found, take(there, 12), strict=True):
            assert step == expected_step
            np.testing.assert_array_equal(tokens, expected)


@pytest.mark.parametrize("way", ["returns", "exits", "raises", "killed", "forks"])
def test_nothing_outlives_a_process(corpora: Corpora, runtime: Runtime, way: str) -> None:
    """`forks`: killed, and survived by a worker that it forked."""
    script = f"""
import os, signal, sys, time
from corpus_client import ArrayLoader
loader = ArrayLoader({str(corpora["web"].path)!r}, seq_len=16, global_batch_size=24)
next(loader)
if {way!r} == "forks" and os.fork() == 0:
    time.sleep(20)
    os._exit(0)
if {way!r} == "exits": sys.exit(3)
if {way!r} == "raises": raise RuntimeError
if {way!r} in ("killed", "forks"): os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), stdout=subprocess.DEVNULL, check=False
    )
    assert done.returncode == {"exits": 3, "raises": 1, "killed": -9, "forks": -9}.get(way, 0)
    wait_until(lambda: not runtime.servers(), "the server is left", 15)
    for each in runtime.processes():  # the forked worker
        each.kill()


class Ranks:
    """`ranks.py`, and what its ranks have written.

    Attributes:
        running: process by rank.
    """

    def __init__(self, source: str, folder: Path, world_size: int = WORLD_SIZE) -> None:
        self.world_size, self.folder = world_size, folder
        self.running: dict[int, int] = {}
        with (folder / f"said-{world_size}").open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.contract.ranks", json.dumps(source), str(world_size)],
                stdin=subprocess.PIPE,
                stdout=said,
                env=environment(PYTHONFAULTHANDLER="1"),
                cwd=ROOT,
                text=True,
            )

    def close(self) -> None:
        """End it, once its ranks have ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def said(self) -> list[list[str]]:
        """Return the lines that it has printed."""
        text = (self.folder / f"said-{self.world_size}").read_text()
        return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]

    def start(self, rank: int, stop: int) -> None:
        """Let a rank go on behind the last step that it has written; a line that is not whole is cut off."""
        before = len(self.said())
        assert self._process.stdin is not None
        file = self.file(rank)
        if file.exists():
            text = file.read_text()
            file.write_text(text[: text.rfind("\n") + 1])
        print("start", rank, len(self.lines(rank)), stop, file, file=self._process.stdin, flush=True)

        def started() -> list[int]:
            return [int(line[2]) for line in self.said()[before:] if line[:2] == ["started", str(rank)]]

        wait_until(started, "no rank was started")
        (self.running[rank],) = started()

    def file(self, rank: int) -> Path:
        """Return the file of a rank's lines."""
        return self.folder / f"{self.world_size}-{rank}"

    def lines(self, rank: int) -> list[str]:
        """Return the whole lines of a rank: of one that is being written, a part may be there."""
        if not self.file(rank).exists():
            return []
        text = self.file(rank).read_text()
        return text[: text.rfind("\n") + 1].splitlines()

    def kill(self, rank: int, stop: int) -> None:
        """Kill a rank as the kernel would, and let another process go on in its place."""
        pid = self.running[rank]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: ["ended", str(pid), "-9"] in self.said(), "the rank does not end")
        self.start(rank, stop)

    def wait(self) -> None:
        """Wait until all ranks have ended well."""
        for pid in self.running.values():
            wait_until(lambda pid=pid: any(each[:2] == ["ended", str(pid)] for each in self.said()))  # type: ignore[misc]
            assert ["ended", str(pid), "0"] in self.said()


def expected_lines(url: list[str], rank: int, world_size: int, num_steps: int) -> list[str]:
    """Return what a rank must write, by a server at a URL."""
    with make_loader(
        url, **PLAN, rank=rank, world_size=world_size, dtype=None, num_steps=num_steps
    ) as loader:
        return [f"{batch.step} {xxhash.xxh3_64_hexdigest(batch.tokens.numpy())}" for batch in loader]


def test_killed_processes_are_replaced_and_no_row_is_wrong(
    corpora: Corpora, replicas: Mapping[str, list[str]], runtime: Runtime, tmp_path: Path
) -> None:
    """The server, its worker, the rank that started the server, another rank: each in turn, by SIGKILL."""
    ranks = Ranks(str(corpora["web"].path), tmp_path)
    stop, draw = 10**6, random.Random(5)
    for rank in range(WORLD_SIZE):
        ranks.start(rank, stop)

    def go_on(steps: int) -> None:
        """Wait until every rank is so many steps further, past all that it had fetched ahead."""
        before = {rank: len(ranks.lines(rank)) for rank in range(WORLD_SIZE)}
        wait_until(
            lambda: all(len(ranks.lines(rank)) >= before[rank] + steps for rank in before),
            lambda: f"stuck: {[log.read_text()[-2000:] for log in runtime.folder.rglob('log')]}",
        )

    def workers() -> list[int]:
        """Return the workers of the only server; none while there is no server, or two."""
        with contextlib.suppress(psutil.Error, ValueError):
            (server,) = runtime.servers()
            return [each.pid for each in psutil.Process(server).children() if each.name() == "corpus-worker"]
        return []

    go_on(20)
    for _ in range(NUM_KILLS):
        for victim in ("server", "worker", "starter", "other"):
            (server,) = runtime.servers()
            starter = psutil.Process(server).ppid()
            of = [rank for rank, pid in ranks.running.items() if (pid == starter) == (victim == "starter")]
            if victim == "server":
                os.kill(server, signal.SIGKILL)
            elif victim == "worker":
                os.kill(*workers(), signal.SIGKILL)
            else:  # a starter that was killed before has left the server to init
                ranks.kill(draw.choice(of or list(ranks.running)), stop)
            go_on(60)
            # Ranks know where the rows of some thousand steps lie, for which they need no server.
            wait_until(lambda: len(workers()) == 1, lambda: f"servers: {runtime.servers()}")
    last = max(len(ranks.lines(rank)) for rank in range(WORLD_SIZE)) + 60
    for rank in range(WORLD_SIZE):
        ranks.kill(rank, last)
    ranks.wait()
    ranks.close()
    runtime.check_nothing_left()
    for rank in range(WORLD_SIZE):
        lines = ranks.lines(rank)[:last]
        assert lines == expected_lines(replicas["1 worker"], rank, WORLD_SIZE, len(lines))


def test_all_killed_at_once_and_resumed_by_another_number_of_ranks(
    corpora: Corpora, replicas: Mapping[str, list[str]], runtime: Runtime, tmp_path: Path
) -> None:
    """Nothing is left that hinders the next run, which needs no more than the step."""
    before = Ranks(str(corpora["web"].path), tmp_path)
    for rank in range(WORLD_SIZE):
        before.start(rank, 10**6)
    wait_until(lambda: all(len(before.lines(rank)) > 50 for rank in range(WORLD_SIZE)))
    for each in runtime.processes():  # the one that forks the ranks, the ranks, the server, its processes
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    before.close()
    step = min(len(before.lines(rank)) for rank in range(WORLD_SIZE))
    world_size = 4
    after = Ranks(str(corpora["web"].path), tmp_path, world_size)
    for rank in range(world_size):
        known = expected_lines(replicas["1 worker"], rank, world_size, step)
        after.file(rank).write_text("".join(f"{line}\n" for line in known))
        after.start(rank, step + 50)
    after.wait()
    after.close()
    for rank in range(world_size):
        assert after.lines(rank) == expected_lines(replicas["1 worker"], rank, world_size, step + 50)


def test_what_is_no_url_and_no_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    forms = r"url must be http://host:port, .*, \{'web': '/data/web', \.\.\.\}, got "
    for source, message in {
        "data": rf"{forms}'data', which is no URL and no file or folder in {tmp_path}",
        "web.bin": rf"{forms}'web.bin', which is no URL",
        "": rf"{forms}''",
        "ftp://data/web": rf"{forms}'ftp://data/web'",
    }.items():
        with pytest.raises(errors.InvalidArgument, match=message):
            make_loader(source)
    for given, message in (
        (
            ["/data/a", "/data/b"],
            r"a list must hold URLs of one server's replicas; several corpora go by name",
        ),
        (["http://data", Path("/data/b")], "a list must hold URLs"),
        ({}, "must name at least one corpus"),
        ({"a b": "/data"}, "corpora must be named by letters"),
        ({"a": 3}, "corpus 'a' must be a path, got 3"),
        (Path("/data\0web"), "a path must have no NUL"),
    ):
        with pytest.raises(errors.InvalidArgument, match=message):
            make_loader(given)  # type: ignore[arg-type]


def test_a_server_that_does_not_start_says_why(tmp_path: Path, runtime: Runtime) -> None:
    with pytest.raises(errors.ServerNotStarted, match=r"/none: expected a token file or a folder of shards"):
        make_loader(tmp_path / "none")
    (tmp_path / "corpus.toml").write_text('[server]\ntokens = "tokens.toml"\n[corpora.web]\npath = "web"\n')
    with pytest.raises(
        errors.ServerNotStarted, match="while_locked is for processes of this host, and tokens"
    ):
        make_loader(tmp_path / "corpus.toml")
    (tmp_path / "corpus.toml").write_text('[server]\nuds = "socket"\n[corpora.web]\npath = "web"\n')
    with pytest.raises(errors.InvalidArgument, match="must leave out uds, which loaders decide"):
        make_loader(tmp_path / "corpus.toml")


def test_the_port_of_a_configuration_is_for_another_server(corpora: Corpora, tmp_path: Path) -> None:
    """Whoever may connect to a port may read; and the server that it is for may be running."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = f'[server]\nport = {port}\n[corpora.web]\npath = "{corpora["web"].path}"\n'
        (tmp_path / "corpus.toml").write_text(config)
        with make_loader(tmp_path / "corpus.toml") as loader:
            next(loader)


def test_files_that_changed_under_another_loader_are_refused_at_once(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "web.bin", np.arange(5000) % 500)
    with make_loader(path, corpus=None) as first:
        next(first)
        write_raw(path, np.arange(5000) % 499)
        with pytest.raises(errors.LocalCopyMismatch, match="close all loaders of this path"):
            make_loader(path, corpus=None)
    with make_loader(path, corpus=None) as anew:
        next(anew)


def test_a_file_that_changes_in_use_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "web.bin", np.arange(500_000) % 500)
    with make_loader(path, corpus=None) as loader:
        next(loader)
        write_raw(path, np.arange(400_000) % 499)
        with pytest.raises(errors.LocalCopyMismatch) as caught:
            deque(loader, maxlen=0)
    assert f"{path}" in str(caught.value)
    assert "close all loaders of this path, and make them anew" in str(caught.value)
    assert "copy it again" not in str(caught.value)


def test_options_that_are_for_servers_at_a_url_are_refused(corpora: Corpora, tmp_path: Path) -> None:
    path = corpora["web"].path
    for name, value in (("auth", "secret"), ("ca_file", "ca.pem"), ("cert_file", "cert.pem")):
        with pytest.raises(errors.InvalidArgument, match=f"{name}= is for a server at a URL") as caught:
            CorpusLoader(path, seq_len=16, global_batch_size=24, network=Network(**{name: value}))  # type: ignore[arg-type]
        assert "secret" not in str(caught.value)
    with pytest.raises(errors.InvalidArgument, match="local_root= is for a server at a URL"):
        CorpusLoader(path, seq_len=16, global_batch_size=24, staging=Staging(local_root=tmp_path))


def test_without_the_server_one_line_says_how(corpora: Corpora, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    with pytest.raises(
        errors.InvalidArgument, match="not installed here; pip install corpus-server, or give the URL"
    ):
        make_loader(corpora["web"].path)


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_another_system_is_refused(corpora: Corpora, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr("sys.platform", platform)
    with pytest.raises(errors.InvalidArgument, match=f"runs on Linux alone, got {platform}; give the URL"):
        make_loader(corpora["web"].path)


def test_a_folder_that_others_may_enter_is_refused(corpora: Corpora, runtime: Runtime) -> None:
    (runtime.folder / "corpus-server").mkdir(mode=0o755)
    with pytest.raises(
        errors.InvalidArgument, match="must be a folder of this user that nobody else may enter"
    ):
        make_loader(corpora["web"].path)


def test_a_loop_of_torchrun(corpora: Corpora, replicas: Mapping[str, list[str]], tmp_path: Path) -> None:
    """By the loader that needs no torch, which each rank would import."""
    script = tmp_path / "train.py"
    script.write_text(
        "import xxhash\n"
        "from corpus_client import ArrayLoader\n"
        f"loader = ArrayLoader({str(corpora['web'].path)!r}, seq_len={SEQ_LEN},\n"
        f"    global_batch_size={GLOBAL_BATCH_SIZE}, seed=7, num_steps=30)\n"
        f"with open(f'{tmp_path}/{{loader.place[0]}}', 'w') as out:\n"
        "    for batch in loader:\n"
        "        print(batch.step, xxhash.xxh3_64_hexdigest(batch.tokens), file=out)\n"
    )
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        str(script),
    ]
    done = subprocess.run(
        words, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        assert (tmp_path / str(rank)).read_text().splitlines() == expected_lines(
            replicas["1 worker"], rank, 4, 30
        )


@pytest.mark.parametrize(
    "variables",
    [
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ],
    ids=["srun", "mpirun"],
)
def test_tasks_of_a_job_share_a_server(
    corpora: Corpora, replicas: Mapping[str, list[str]], runtime: Runtime, variables: tuple[str, str, str]
) -> None:
    """Each is a process that knows its rank from its environment alone."""
    script = (
        "import xxhash\n"
        "from corpus_client import ArrayLoader\n"
        f"loader = ArrayLoader({str(corpora['web'].path)!r}, seq_len={SEQ_LEN},\n"
        f"    global_batch_size={GLOBAL_BATCH_SIZE}, seed=7, num_steps=30)\n"
        "for batch in loader:\n"
        "    print(batch.step, xxhash.xxh3_64_hexdigest(batch.tokens))\n"
    )
    rank, size, local = variables
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment(**{rank: str(number), size: "3", local: str(number)}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for number, task in enumerate(tasks):
        lines = task.communicate()[0].splitlines()
        assert task.returncode == 0
        assert lines == expected_lines(replicas["1 worker"], number, 3, 30)
    assert len([*runtime.folder.rglob("loaders")]) == 1, "one server for all"
    runtime.check_nothing_left()


def test_actors_of_ray(corpora: Corpora, replicas: Mapping[str, list[str]], runtime: Runtime) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed here")

    def run(rank: int, path: str) -> list[str]:
        from corpus_client import Placement

        place = Placement(rank=rank, world_size=2)
        with CorpusLoader(path, **PLAN, dtype=None, device="cpu", num_steps=30, placement=place) as loader:  # type: ignore[arg-type]
            return [f"{batch.step} {xxhash.xxh3_64_hexdigest(batch.tokens.numpy())}" for batch in loader]

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        tasks = [ray.remote(run).remote(rank, str(corpora["web"].path)) for rank in range(2)]
        for rank, lines in enumerate(ray.get(tasks)):
            assert lines == expected_lines(replicas["1 worker"], rank, 2, 30)
        wait_until(lambda: not [*runtime.folder.rglob("socket")], "the server does not end with the tasks")
    finally:
        ray.shutdown()  # kills what its workers have started
