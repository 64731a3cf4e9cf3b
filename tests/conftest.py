"""What tests share: a small set of corpora in several formats, and a real server over them."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings

from tests.completeness import Completeness
from tests.corpora import some_tokens, write_llmc, write_megatron, write_npy, write_raw
from tests.serving import RunningServer

# The tests start some hundred servers and clients. Compiled modules save each of them 0.3 s of CPU.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A background job of a shell script, or a process under `nohup`, begins with signals that are ignored. Python
# then raises no KeyboardInterrupt, and every child ignores these signals, too.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# The same examples at each run: anyone can repeat a verdict on a commit.
# No deadline: an example that takes long on a busy machine is no failure. Benchmarks show speed.
settings.register_profile("same", deadline=None, print_blob=True, derandomize=True, database=None)
# Other examples at each run: --hypothesis-profile explore.
settings.register_profile("explore", deadline=None, print_blob=True, derandomize=False)
settings.load_profile("same")

SLOW = (
    "scripts",
    "test_scripts.py",
    "test_gpu.py",
    "test_timeouts.py",
    "docker",
    "browser",
    "examples",
    "faults",
)
"""Files and folders of long tests. They come first: one process would be left alone with the last of them."""

COLLECTION_SECONDS = 400
"""Until all tests are found: 20 s of three processes on a busy machine, two minutes with a load of 12."""

EXIT_SECONDS = 60
"""Of the process, after the last test."""

TEXT = "The quick brown fox jumps over the lazy dog; größer, naïve, 漢字.\n" * 40
DOCUMENTS = ([10, 11, 12, 99], [20, 99], [30, 31, 32, 33, 99])


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """End a process that hangs while it imports the tests: the time-out of a test begins later.

    Nothing of what is imported is garbage: to look for it takes a quarter of this time, and again in each
    collection of a test.
    """
    # Not standard error, which pytest captures meanwhile.
    file = session.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(COLLECTION_SECONDS, exit=True, file=file)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        faulthandler.cancel_dump_traceback_later()


def pytest_configure(config: pytest.Config) -> None:
    """Watch over the processes of a run, in the process that leads them."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Completeness())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long tests first."""
    tests = Path(__file__).parent
    items.sort(key=lambda item: item.path.relative_to(tests).parts[0] not in SLOW)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Load the simulated device before any test of this process, if one of them needs it."""
    if any(
        "accelerator" in getattr(item, "fixturenames", ())
        or "simulated_device" in item.path.parts
        or item.path.name == "test_gpu.py"
        for item in session.items
    ):
        from tests.simulated_device import backend

        if not backend.missing():
            backend.load()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the process in time: the interpreter waits for a thread that a test has left, without a limit.

    One of several processes waits here for the others to finish; pytest-xdist ends it.
    """
    if not hasattr(config, "workerinput"):
        faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True, file=sys.__stderr__)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads of torch, which wait for each other on a busy machine."""
    torch = sys.modules.get("torch")  # some integrations need none
    before = None if torch is None else torch.get_num_threads()
    if torch is not None:
        torch.set_num_threads(1)
    yield
    if torch is not None:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class ServedCorpus:
    """A corpus on disk and the tokens that were written there."""

    path: Path
    shards: tuple[np.ndarray, ...]

    @property
    def tokens(self) -> np.ndarray:
        """All tokens, in the type of the responses."""
        return np.concatenate(self.shards)


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServedCorpus]:
    """Corpora by name; none of them may be changed.

    web    three raw uint16 shards, one with a two-digit number
    mixed  llm.c uint16, an empty npy, npy uint32 and raw uint16: answers are uint32
    docs   Megatron with three documents
    text   bytes of a text
    words  tokens of the same text by a tokenizer.json
    """
    folder = tmp_path_factory.mktemp("corpora")

    def make(name: str, shards: Sequence[np.ndarray]) -> ServedCorpus:
        return ServedCorpus(folder / name, tuple(shards))

    for name in ("web", "mixed", "words"):
        (folder / name).mkdir()
    web = [some_tokens(count, seed=count) for count in (4001, 2500, 3333)]
    for number, tokens in zip((1, 2, 10), web, strict=True):
        write_raw(folder / "web" / f"{number}.bin", tokens)
    mixed = [
        some_tokens(700, seed=1),
        np.empty(0, "uint16"),
        some_tokens(901, dtype="uint32", vocabulary=2**32, seed=2),
        some_tokens(333, seed=3),
    ]
    write_llmc(folder / "mixed" / "0.bin", mixed[0])
    write_npy(folder / "mixed" / "1.npy", mixed[1])
    write_npy(folder / "mixed" / "2.npy", mixed[2], dtype="uint32")
    write_raw(folder / "mixed" / "3.bin", mixed[3])
    write_megatron(folder / "docs", DOCUMENTS)
    text = np.frombuffer(TEXT.encode(), np.uint8)
    write_npy(folder / "text.npy", text, dtype="uint8")
    words = word_tokens(folder / "words" / "tokenizer.json")
    write_raw(folder / "words" / "0.bin", words)
    return {
        "web": make("web", web),
        "mixed": make("mixed", mixed),
        "docs": make("docs.bin", [np.array([t for d in DOCUMENTS for t in d], "uint16")]),
        "text": make("text.npy", [text]),
        "words": make("words", [words]),
    }


def word_tokens(path: Path) -> np.ndarray:
    """Train a small byte-level BPE on the text, save it, and return the text's tokens."""
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([TEXT], vocab_size=300, show_progress=False)
    tokenizer.save(str(path))
    return np.array(tokenizer.encode(TEXT).ids, "uint16")


@pytest.fixture(scope="session")
def server(
    corpora: dict[str, ServedCorpus], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server of two workers over `corpora`; tests must leave it as it is."""
    paths = {name: corpus.path for name, corpus in corpora.items()}
    with RunningServer(paths, tmp_path_factory.mktemp("server"), workers=2) as running:
        yield running


@pytest.fixture
def receipts_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a checkpoint wait for its receipt however long a busy machine takes; after 2 s it has none."""
    monkeypatch.setattr("corpus_client.plan.receipts.RECEIPT_SECONDS", 300.0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # a server that has just ended may be freed late
