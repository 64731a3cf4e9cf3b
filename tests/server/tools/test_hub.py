"""Repositories of the Hugging Face Hub, from a hub on loopback, through the command line and a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.hub import Hub
from tests.server.corpus.test_tokenizers import write_tokenizer_json
from tests.server.tools.building.sources import lines, texts, write_jsonl
from tests.serving import ROOT, RunningServer, environment, run_here, wait_until

pytest.importorskip("huggingface_hub")

DATA = "datasets/org/web10B"
TRAIN = [f"web_train_{number:06}.bin" for number in (1, 2)]
TOKENS = {name: np.arange(500 * number, dtype="<u2") for number, name in enumerate(TRAIN, 2)}

# In a process of its own, because the library reads its environment when it is imported.
_RUN = """
import json, sys
from tests.serving import run_here
runs = [run_here(*arguments) for arguments in json.load(sys.stdin)]
print(json.dumps([[run.returncode, run.stdout, run.stderr] for run in runs]))
"""

Run = Callable[..., list[tuple[int, str, str]]]
"""Runs command lines one after another; returns code, output and errors of each."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    data = {name: tokens.tobytes() for name, tokens in TOKENS.items()}
    others = {"web_val_000000.bin": bytes(range(200)), "README.md": b"# web", "logo.png": b"p", ".x": b"x"}
    repositories = {
        DATA: {"main": {**data, **others}},
        "datasets/org/rows": {"main": {"data/train.parquet": b"PAR1"}},
        "datasets/org/closed": {"main": data},
        "org/model": {"main": {"model.safetensors": b"x"}},
    }
    with Hub(repositories, gated={"datasets/org/closed"}, token="hf_right") as hub:
        yield hub


@pytest.fixture
def run(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    for name, value in hub.environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)

    def run(*commands: Sequence[object], **variables: str) -> list[tuple[int, str, str]]:
        said = subprocess.run(
            [sys.executable, "-c", _RUN],
            input=json.dumps([[*map(str, each)] for each in commands]),
            env=environment(**variables),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return [tuple(each) for each in json.loads(said.stdout)]

    return run


def test_a_split_is_served_from_the_commit_that_was_the_newest(hub: Hub, run: Run, tmp_path: Path) -> None:
    url, commit = f"hf://{DATA}#train", hub.commit(DATA)
    ((code, out, err),) = run(("inspect", url, "--json"))
    assert (code, err.splitlines()[0]) == (0, f"hf://{DATA}@{commit}: 2 files, 5.0 kB, 5.0 kB to download")
    assert json.loads(out)["name"] == "web10B-train"
    assert sorted(hub.downloads) == TRAIN

    # What is in the cache is not asked for again; commands may add files.
    hub.asked.clear()
    recorded, _ = run(("verify", "--record", url), ("verify", f"hf://{DATA}@{commit}#train"))
    assert recorded[0] == 0
    assert hub.asked == [f"api/{DATA}/revision/main"]
    there, missing = run(("inspect", url, "--json"), ("inspect", f"hf://{DATA}#val"), HF_HUB_OFFLINE="1")
    assert json.loads(there[1])["fingerprint_kind"] == "full"
    assert (missing[0], "HF_HUB_OFFLINE is set" in missing[2]) == (2, True)

    config = f'[corpora.web]\npath = "{url}"\n[corpora.first]\npath = "hf://{DATA}@{commit}/{TRAIN[0]}"'
    named = {"all": f"hf://{DATA}"}
    with RunningServer(named, tmp_path, config=config, workers=2, arguments=["--splits"]) as server:
        got = np.frombuffer(server.get("/v1/corpora/web/tokens?start=900&count=200").body, "<u2")
        corpora = {each["name"]: each["num_tokens"] for each in server.get("/v1/corpora").json()["corpora"]}
        # A server keeps its commit when it reads its configuration again.
        hub.repositories[DATA]["main"] = {"new.bin": bytes(20)}
        hub.asked.clear()
        os.kill(server.pid, signal.SIGHUP)
        wait_until(lambda: "were replaced" in server.log(), server.log)
        assert (server.get("/v1/corpora/web").json()["num_tokens"], hub.asked) == (2500, [])
    assert got.tolist() == np.concatenate([*TOKENS.values()])[900:1100].tolist()
    assert corpora == {"web": 2500, "first": 1000, "all-train": 2500, "all-val": 100}
    assert sorted(hub.downloads) == [*TRAIN, "web_val_000000.bin"]


def test_a_branch_stays_at_its_commit_until_it_is_asked_again(hub: Hub, run: Run) -> None:
    before = hub.commit(DATA)
    run(("inspect", f"hf://{DATA}#train"))
    hub.repositories[DATA] = {"main": {"a.bin": bytes(20)}, "v1": hub.repositories[DATA]["main"]}
    hub.downloads.clear()
    newest, tag, pinned = run(
        *(("inspect", f"hf://{DATA}{each}", "--json") for each in ("", "@v1#train", f"@{before}#train"))
    )
    assert [json.loads(out)["num_tokens"] for _, out, _ in (newest, tag, pinned)] == [10, 2500, 2500]
    assert hub.downloads == ["a.bin"]
    hub.status = 503
    ((_, out, err),) = run(("inspect", f"hf://{DATA}", "--json"), HF_HUB_OFFLINE="1")
    assert json.loads(out)["num_tokens"] == 10, err


MISTAKES = {
    "hf://datasets/org/none": "has no data set 'org/none', or it is private (check the name",
    "hf://org/none": "has no model 'org/none', or it is private",
    "hf://spaces/org/x": "path must be hf://datasets/ORG/NAME or hf://ORG/NAME, got 'hf://spaces/org'",
    f"hf://{DATA}@v9#train": "has no such branch, tag or commit",
    f"hf://{DATA}": f"several splits: train ({TRAIN[0]}, {TRAIN[1]}), val (web_val_000000.bin); ",
    f"hf://{DATA}/nothing": "has no file 'nothing'; there are .x, README.md, logo.png, web_train_000001.bin",
    f"hf://{DATA}/*_trian_*.bin": "the pattern '*_trian_*.bin' matches no token file",
    "hf://datasets/org/rows": "org/rows/data/train.parquet: is a Parquet file, which is not served",
    "hf://org/model": "model.safetensors: is a safetensors file, which is not served",
    f"hf://{DATA}#train,tokenizer=org/model": "holds no tokenizer, which is called tokenizer.json or",
    f"hf://{DATA}#train,tokenizer=gpt3": "has no model 'gpt3', or it is private",
    "hf://datasets/org/closed": "is gated: its owners decide who may read it (ask for access on http",
}


def test_a_mistake_is_one_line_and_downloads_nothing(hub: Hub, run: Run) -> None:
    said = run(*(("inspect", each) for each in MISTAKES))
    for (code, _, err), (url, expected) in zip(said, MISTAKES.items(), strict=True):
        *_, line = err.splitlines()
        assert code == 2, url
        assert line.startswith("error: "), url
        assert expected in line, url
    assert hub.downloads == []


def test_a_token_opens_a_gated_repository(run: Run) -> None:
    ((code, _, err),) = run(("inspect", "hf://datasets/org/closed"), HF_TOKEN="hf_right")
    assert code == 0, err


def test_what_does_not_fit_is_not_begun(hub: Hub, run: Run) -> None:
    hub.sizes[DATA, TRAIN[0]] = 10**18
    ((code, _, err),) = run(("inspect", f"hf://{DATA}#train"))
    assert (code, hub.downloads) == (2, [])
    assert "1,000,000,000.0 GB to download, but the disk of " in err
    assert "make room, or set HF_HOME to another disk" in err.splitlines()[-1]


def test_a_full_disk_is_said_and_the_same_command_continues(hub: Hub, run: Run, small_disk: Path) -> None:
    hub.repositories[DATA]["main"]["web_val_000000.bin"] = bytes(2_000_000)
    hub.sizes[DATA, "web_val_000000.bin"] = 10  # so that the room seems to suffice
    command = ("inspect", f"hf://{DATA}#val")
    ((code, _, err),) = run(command, HF_HOME=str(small_disk))
    assert code == 2
    assert f"the disk of {small_disk}/hub is full (make room, or set HF_HOME" in err.splitlines()[-1]
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    hub.sizes.clear()
    ((code, _, err),) = run(command, HF_HOME=str(small_disk))
    assert code == 0, err


@pytest.mark.parametrize("down", [True, False], ids=["no-network", "out-of-order"])
def test_a_hub_that_does_not_answer_is_one_line_unless_the_cache_has_all(
    hub: Hub, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, down: bool
) -> None:
    run(("inspect", f"hf://{DATA}#train"))
    if down:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    hub.status = 500
    first, second = run(("inspect", f"hf://{DATA}#train"), ("inspect", "hf://datasets/org/none"))
    assert first[0] == 0, first
    assert (second[0], len(second[2].splitlines())) == (2, 1), second
    assert "did not deliver: " in second[2]
    assert "Errno" not in second[2]
    assert "check the network and HF_ENDPOINT" in second[2]


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_tokenizer_that_the_hub_does_not_give_names_the_ways_without_it(
    run: Run, tmp_path: Path, offline: str
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(3))
    variables = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_OFFLINE": offline}
    ((code, _, err),) = run(("build", source, "--tokenizer", "gpt2", "--out", tmp_path / "out"), **variables)
    assert code == 2
    assert "a tokenizer.json of this machine, or `bytes`, needs no network" in err.splitlines()[-1]


def test_a_corpus_is_built_of_a_repository_and_its_tokenizer(hub: Hub, run: Run, tmp_path: Path) -> None:
    tokenizer = write_tokenizer_json(tmp_path)
    hub.repositories["org/tok"] = {"main": {"tokenizer.json": tokenizer.read_bytes(), "model.bin": b"x"}}
    rows = {"data/a.jsonl": lines(texts(5), "body"), "data/b.jsonl": lines(texts(7, seed=1), "body")}
    hub.repositories["datasets/org/texts"] = {"main": {**rows, "README.md": b"#", "other/c.txt": b"c"}}
    source = "hf://datasets/org/texts/data?text=body"
    ((code, _, err),) = run(
        ("build", source, "--tokenizer", "org/tok", "--out", tmp_path / "out", "--processes", 1)
    )
    assert code == 0, err
    assert sorted(hub.downloads) == [*rows, "tokenizer.json"]
    local = [
        write_jsonl(tmp_path / f"{number}.jsonl", texts(5 + 2 * number, seed=number)) for number in (0, 1)
    ]
    run_here("build", *local, "--tokenizer", tokenizer, "--out", tmp_path / "same", "--processes", "1")
    one, other = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("out", "same"))
    assert one["fingerprint"] == other["fingerprint"]
    # Files of several splits are refused before one is downloaded.
    hub.repositories["datasets/org/splits"] = {"main": {"train.jsonl": b"{}", "data/val.jsonl": b"{}"}}
    source, before = "hf://datasets/org/splits", len(hub.downloads)
    ((code, _, err),) = run(("build", source, "--tokenizer", "bytes", "--out", tmp_path / "no"))
    assert code == 2
    assert "several splits: " in err
    assert f"choose one: {source}#" in err
    assert len(hub.downloads) == before
    commit = hub.commit("datasets/org/texts")
    assert [each["path"] for each in one["origins"][0]["sources"]] == [
        *(f"hf://datasets/org/texts@{commit}/{name}?text=body" for name in rows),
        "tokenizer.json",
    ]


def test_items_of_a_repository_are_found_by_split(hub: Hub, run: Run, tmp_path: Path) -> None:
    """Of `#test` alone, which is all that is downloaded; items are told by the address and its commit."""
    said = "Which of the rivers of the old kingdom is the longest one that has a bridge?"
    write_jsonl(tmp_path / "web.jsonl", [f"A page. {said} Another.", "Nothing to see here."])
    row = '{{"question": "{}", "choices": ["no text that is long enough"]}}\n'
    hub.repositories["datasets/org/quiz"] = {
        "main": {
            "data/test-00000-of-00001.jsonl": (row.format("Nowhere at all.") + row.format(said)).encode(),
            "data/train-00000-of-00001.jsonl": row.format("Another text, of another split.").encode(),
        }
    }
    asked = ("--field", "question", "--field", "choices", "-n", "20", "--json")
    built, found, whole = run(
        ("build", tmp_path / "web.jsonl", "--tokenizer", "bytes", "--eot", "0", "--out", tmp_path / "web"),
        ("find", tmp_path / "web", "--items", "hf://datasets/org/quiz#test", *asked),
        ("find", tmp_path / "web", "--items", "hf://datasets/org/quiz", *asked),
    )
    assert (built[0], found[0]) == (0, 0), found[2]
    report = json.loads(found[1])
    ((source, number, spans),) = [(each["source"], each["number"], each["spans"]) for each in report["items"]]
    assert (report["num_items"], number, [(each["num_tokens"], each["documents"]) for each in spans]) == (
        2,
        1,
        [(len(said), [0])],
    )
    assert source.endswith("data/test-00000-of-00001.jsonl")
    assert hub.downloads == ["data/test-00000-of-00001.jsonl"]
    assert (whole[0], "several splits: test" in whole[2]) == (2, True)
