"""Bills of each kind of plan, of content that has changed since, and beside what ranks were trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_client import ArrayLoader, TrainedLog
from corpus_server.corpus.index import index as make_index
from corpus_server.corpus_spec import CorpusSpec
from tests.contract.bills.making import PLAN, START, STOP, naive_root, run, sha
from tests.contract.conftest import make_loader
from tests.corpora import some_tokens, write_raw
from tests.metadata import write_metadata
from tests.serving import RunningServer, run_here


def test_a_bill_outlives_full_hashes_and_new_content(tmp_path: Path) -> None:
    """Neither a record of all bytes nor another corpus under the name changes what a plan was made of."""
    path = write_raw(tmp_path / "web.bin", some_tokens(3_000_000))
    stage = {"from_step": 0, "global_batch_size": 4, "mixture": {"web": 1}}
    (tmp_path / "plan.json").write_text(json.dumps({"seq_len": 16, "stages": [stage]}))
    bill = tmp_path / "bill.json"
    with RunningServer({"web": path}, tmp_path) as server:
        done = run("bill", server.url, "--plan", tmp_path / "plan.json", "--stop", 9, "--out", bill)
        assert done.exit_code == 0, done.output
    assert run_here("verify", path, "--record").returncode == 0
    other = write_raw(tmp_path / "other.bin", some_tokens(70_000, seed=1))
    with RunningServer({"web": path}, tmp_path) as server:
        done = run("verify-bill", bill, server.url)
        assert done.exit_code == 0, done.output
    with RunningServer({"old": path, "web": f"{other},earlier=old"}, tmp_path) as server:
        done = run("verify-bill", bill, server.url, "--json")
        assert (done.exit_code, json.loads(done.stdout or "{}").get("not_checked")) == (
            0,
            ["made_by", "sources.web.dtype"],
        ), done.output


def test_what_ranks_were_trained_on_is_compared(made: Path, server: RunningServer, tmp_path: Path) -> None:
    """By loaders of NumPy and of torch, whose tokens have other types."""
    paths = [tmp_path / f"rank-{rank}.jsonl" for rank in range(2)]
    with ArrayLoader(server.url, plan=PLAN, rank=0, world_size=2) as loader:
        loader.seek(START)
        with TrainedLog(paths[0], loader.place) as log:
            for _ in range(START, STOP):
                log.add(next(loader))
    unset = {"corpus": None, "seq_len": None, "global_batch_size": None, "seed": 0}
    with make_loader(server.url, plan=PLAN, rank=1, world_size=2, **unset) as torch_loader:
        torch_loader.seek(START)
        with TrainedLog(paths[1], torch_loader.place) as log:
            for _ in range(5):
                log.add(next(torch_loader))
    given = [word for path in paths for word in ("--trained", path)]
    done = run("verify-bill", made, server.url, *given, "--json")
    assert done.exit_code == 0, done.output
    first, second = json.loads(done.stdout)["trained"]
    assert (first[:44], second[:43]) == (
        "rank 0 of 2 was trained on 13 of the 13 step",
        "rank 1 of 2 was trained on 5 of the 13 step",
    )
    lines = paths[1].read_text().splitlines()
    damaged = {
        lines[0].replace(f'"step": {START}', f'"step": {STOP}'): (1, f"is of step {STOP}"),
        lines[0].replace(f'"step": {START}', f'"step": {START + 1}'): (
            1,
            "was trained on other tokens at step 3",
        ),
        lines[0].replace('"rank": 1', '"rank": 0'): (1, "rank 0 of 2 was trained on other tokens at step 2"),
        '{"step": 2}': (2, "is no line of a TrainedLog"),
        f"{lines[0]}\n{lines[1]}\n{lines[3]}": (1, "rank 1 of 2 has no line of step 4, and lines before"),
    }
    for text, (code, said) in damaged.items():
        paths[1].write_text(text)
        done = run("verify-bill", made, server.url, *given)
        assert (done.exit_code, said in " ".join(done.stderr.split())) == (code, True), (said, done.output)


KINDS: dict[str, dict[str, Any]] = {
    "stages and skips": {
        "stages": [
            {"from_step": 0, "global_batch_size": 6, "mixture": {"web": 2, "code": 1}},
            {"from_step": 7, "global_batch_size": 4, "mixture": {"code": 1}, "exclude": {"code": [[0, 300]]}},
        ],
        "skip_steps": [[3, 5]],
    },
    "rows of documents": {"rows": "documents"},
    "rows that begin with a document": {"rows": {"documents": {"begin": True}}},
    "a member of a family": {"family": {"member": 3, "leave_out": 0.25}},
    "a member by a column": {
        "rows": "documents",
        "family": {"member": 3, "leave_out": 0.25, "double": 0.2, "by": "site"},
    },
}


@dataclass(frozen=True)
class TwoCorpora:
    """A server of two corpora, what a command is given to read them itself, and a copy with other tokens."""

    server: RunningServer
    folders: dict[str, Path]
    sources: list[str]
    changed: list[str]


def sources_of(folders: Mapping[str, Path]) -> list[str]:
    """Return the corpora of folders as a command takes them."""
    return [f"{name}={folder},eot=0,eot_at=last" for name, folder in folders.items()]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoCorpora]:
    top = tmp_path_factory.mktemp("two")
    folders = {name: top / name for name in ("web", "code")}
    for seed, folder in enumerate(folders.values()):
        tokens = some_tokens(4000, seed=seed) % 500 + 1
        tokens[19::37] = 0
        folder.mkdir()
        write_raw(folder / "0.bin", tokens)
        make_index(CorpusSpec.parse(f"{folder},eot=0,eot_at=last"))
        write_metadata(folder / "documents", {"site": [f"{n % 20}.org" for n in range(109)]})
    changed = {name: shutil.copytree(folder, top / f"changed-{name}") for name, folder in folders.items()}
    file = changed["code"] / "0.bin"
    file.write_bytes((np.fromfile(file, np.uint16) + np.uint16(1)).tobytes())
    sources = sources_of(folders)
    with RunningServer(dict(each.split("=", 1) for each in sources), top) as server:
        yield TwoCorpora(server, folders, sources, sources_of(changed))


@pytest.mark.parametrize("kind", [*KINDS, "continued"])
def test_a_bill_of_each_kind_of_plan_is_of_what_is_served(two: TwoCorpora, tmp_path: Path, kind: str) -> None:
    """Root, rows and tokens against the batches of each step; by path, and by a proof."""
    server = two.server
    stage = {"from_step": 0, "global_batch_size": 6, "mixture": {"web": 2, "code": 1}}
    document = {"seq_len": 32, "seed": 3, "stages": [stage], **KINDS.get(kind, {})}
    made = server.post_plan(document)
    assert made.status == 200, made.body
    plan = made.json()["id"]
    if kind == "continued":
        later = {
            "from_step": 6,
            "global_batch_size": 3,
            "mixture": {"web": 1},
            "exclude": {"web": [[9, 400]]},
        }
        plan = server.post_plan({"parent": plan, "stages": [later]}).json()["id"]
    saved, bill, proof = (tmp_path / f"{name}.json" for name in ("plan", "bill", "proof"))
    saved.write_bytes(server.get(f"/v1/plans/{plan}/file").body)
    done = run("bill", server.url, "--plan", saved, "--stop", STOP, "--out", bill)
    assert done.exit_code == 0, done.output
    batches = [server.get("/v1/batches", plan=plan, step=step) for step in range(STOP)]
    done = run("prove", bill, "--step", 8, "--out", proof)
    assert done.exit_code == 0, done.output
    done = run("verify-bill", bill, server.url, "--proof", proof)
    assert done.exit_code == 0, done.output
    bodies = [np.frombuffer(each.body, each.headers["Corpus-Dtype"]).astype("<u4") for each in batches]
    leaves = [sha(b"\0", step.to_bytes(8, "big"), sha(body.tobytes())) for step, body in enumerate(bodies)]
    told = json.loads(bill.read_text())
    assert told["tree"]["root"] == naive_root(leaves).hex()
    num_rows = sum(int(each.headers["Corpus-Shape"].split(",")[1]) for each in batches)
    assert sum(source["used"]["rows"] for source in told["sources"].values()) == num_rows
    done = run("verify-bill", bill, *two.sources)
    assert done.exit_code == 0, done.output
    if "by" in document.get("family", {}):
        # Elsewhere: the server of the command before may still be there, with the metadata that it has read.
        others = {
            name: shutil.copytree(path, tmp_path / f"other-{name}") for name, path in two.folders.items()
        }
        write_metadata(others["code"] / "documents", {"site": [f"{n % 19}.org" for n in range(109)]})
        done = run("verify-bill", bill, *sources_of(others))
        assert done.exit_code == 2, done.output
        assert "the values of column 'site' are others" in " ".join(done.stderr.split())
    done = run("verify-bill", bill, *two.changed)
    assert done.exit_code != 0
