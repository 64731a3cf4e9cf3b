"""`corpus-server explore` and `stats` say the same of files as of a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from corpus_server.corpus.index import index
from tests.corpora import spec, write_raw
from tests.serving import RunningServer, run_here
from tests.tokens import Tokens

SMALL = ("--seq-len", "16", "--batch-size", "3")
TEXTS = [b"first document\x00", b"the \x1b[31msecond\x00", "dr\u00fcben \u202eturned\x00".encode()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explored") / "words.bin"
    write_raw(path, np.frombuffer(b"".join(TEXTS) * 20, np.uint8), dtype="uint8")
    index(spec(path, dtype="uint8", eot=0))
    return path


@pytest.fixture(scope="module")
def served(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("served")
    tokens = Tokens(folder / "tokens.toml")
    tokens.add("reader", "read:*", "plans", "inspect")
    with RunningServer(
        {"words": f"{corpus},dtype=uint8"}, folder, arguments=["--tokens", str(tokens.path)]
    ) as server:
        yield server.url, tokens.header("reader")["Authorization"].removeprefix("Bearer ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("explore", "--document", "1"),
        ("explore", "--start", "3", "--count", "40"),
        ("explore", "--step", "2", "--seq-len", "16", "--batch-size", "3", "--seed", "7"),
        ("explore", "--step", "2", "--seq-len", "16", "--batch-size", "3", "--rows", "documents"),
        ("stats",),
        ("explore", "--start", "3", "--json"),
        ("stats", "--seed", "1", "--json"),
    ],
    ids=["document", "range", "step", "step of documents", "stats", "range as JSON", "stats as JSON"],
)
def test_files_and_server_give_the_same(
    corpus: Path, served: tuple[str, str], arguments: tuple[str, ...]
) -> None:
    url, token = served
    name, *options = arguments
    of_files = run_here(name, f"words={corpus},dtype=uint8", *options)
    of_server = run_here(name, url, *options, CORPUS_TOKEN=token)
    assert (of_files.returncode, of_server.returncode) == (0, 0), of_files.stderr + of_server.stderr
    assert of_files.stdout == of_server.stdout


def test_a_run_names_its_plan(served: tuple[str, str]) -> None:
    """The command names itself when it posts a plan. `http://` may be left out."""
    url, token = served
    asked = (url.removeprefix("http://"), "--step", "1", "--json")
    spelled = run_here("explore", *asked, *SMALL, "--seed", "99", CORPUS_TOKEN=token)
    named = run_here("explore", *asked, "--run", "explore", CORPUS_TOKEN=token)
    assert (named.returncode, named.stdout) == (0, spelled.stdout), named.stderr
    unknown = run_here("explore", *asked, "--run", "typo", CORPUS_TOKEN=token)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "no run named 'typo' has posted a plan here" in unknown.stderr


def test_a_document_is_shown_and_its_control_characters_by_name(corpus: Path) -> None:
    shown = run_here("explore", f"{corpus},dtype=uint8", "--document", "1").stdout
    assert "[document 1] the \\x1b[31msecond" in shown
    assert "\x1b" not in shown
    assert "first" not in shown
    shown = run_here("explore", f"{corpus},dtype=uint8", "--document", "2").stdout
    assert "dr\u00fcben \\u202eturned" in shown


def test_statistics_are_drawn(corpus: Path) -> None:
    shown = run_here("stats", f"{corpus},dtype=uint8").stdout
    assert "60 of 60 documents sampled" in shown
    assert "\u2588" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("explore", "{url}", "--document", "900"), "document must be in [0, 60)"),
        (("explore", "{url}", "--corpus", "none"), "none"),
        (("explore", "http://127.0.0.1:9"), "is the server running?"),
        (("explore", "{url}", "--run", "a"), "--plan and --run need --step"),
        (
            ("explore", "{corpus}", "--plan", "0" * 64, "--step", "1"),
            "need a server; spell the plan",
        ),
    ],
)
def test_a_mistake_is_one_line(
    corpus: Path, served: tuple[str, str], arguments: tuple[str, ...], said: str
) -> None:
    url, token = served
    filled = [each.format(url=url, corpus=f"{corpus},dtype=uint8") for each in arguments]
    done = run_here(*filled, CORPUS_TOKEN=token)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
