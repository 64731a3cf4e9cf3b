"""Each field of a bill and of a proof is compared, or named as not compared."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corpus_server.corpus.index import index as make_index
from corpus_server.corpus_spec import CorpusSpec
from tests.contract.bills.making import proof_of, run
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer


def leaves_in(value: Any, field: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield what no dict or list of a JSON value holds more of, and where it stands; an empty one, too."""
    if isinstance(value, (dict, list)) and value:
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves_in(each, (*field, name))
    else:
        yield field, value


def with_changes(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a document with each field in turn changed, taken away, and with another one beside it."""
    for field, value in leaves_in(document):
        for how in ("changed", "removed", "added"):
            copied = copy.deepcopy(document)
            holder: Any = copied
            for name in field[:-1]:
                holder = holder[name]
            if how == "added":
                if not isinstance(holder, dict):
                    continue
                holder["invented"] = 1
            elif how == "removed":
                del holder[field[-1]]
            elif isinstance(value, str):
                holder[field[-1]] = value[:-1] + ("1" if value.endswith("0") else "0")
            else:
                holder[field[-1]] = value + 1 if isinstance(value, (int, float)) else 1
            yield ".".join(map(str, field)) + ("" if how != "added" else " beside"), copied


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path, Path]]:
    """A server, a bill of it in which every field has a value, and the path of its corpus."""
    folder = tmp_path_factory.mktemp("full")
    tokens = some_tokens(5000) % 500 + 1
    tokens[19::37] = 0
    path = write_raw(folder / "web.bin", tokens)
    make_index(CorpusSpec.parse(f"{path},eot=0,eot_at=last"))
    stages = [
        {"from_step": 0, "global_batch_size": 8, "mixture": {"web": 1, "more": 1}},
        {"from_step": 9, "global_batch_size": 8, "mixture": {"web": 1}, "exclude": {"web": [[100, 140]]}},
    ]
    plan = {"seq_len": 16, "stages": stages, "skip_steps": [[3, 5]]}
    (folder / "plan.json").write_text(json.dumps(plan))
    served = f"{path},eot=0,eot_at=last,license=MIT,address=https://example.org/web"
    more = write_raw(folder / "more.bin", some_tokens(3000, seed=2))
    with RunningServer({"web": served, "more": more}, folder) as server:
        done = run(
            "bill", server.url, "--plan", folder / "plan.json", "--stop", 14, "--out", folder / "b.json"
        )
        assert done.exit_code == 0, done.output
        yield server, folder / "b.json", path


@pytest.mark.parametrize("what", ["bill", "bill by one step", "proof"])
def test_every_field_is_compared_or_named(
    full: tuple[RunningServer, Path, Path], tmp_path: Path, what: str
) -> None:
    server, bill, _ = full
    proof = proof_of(bill, 6, tmp_path)
    words = () if what == "bill" else ("--proof", proof)
    unknown = ["made_by", *(["tokens of the other steps (13)"] if words else [])]
    done = run("verify-bill", bill, server.url, *words, "--json")
    assert (done.exit_code, json.loads(done.stdout)["not_checked"]) == (0, unknown), done.output
    changed, document = (
        tmp_path / "changed.json",
        json.loads((proof if what == "proof" else bill).read_text()),
    )
    files = (bill, "--proof", changed) if what == "proof" else (changed, *words)
    passed: dict[str, list[list[str]]] = {}
    changes = list(with_changes(document))
    assert len(changes) > (20 if what == "proof" else 120)
    for field, each in changes:
        changed.write_text(json.dumps(each))
        done = run("verify-bill", files[0], server.url, *files[1:], "--json")
        assert done.exit_code in {0, 1, 2}, (field, done.output)
        assert isinstance(done.exception, SystemExit | None), (field, done.exception)
        if done.exit_code == 0:
            passed.setdefault(field, []).append(json.loads(done.stdout)["not_checked"])
    if what == "proof":
        assert not passed
        return
    # What makers may not have known can be taken away, and is named.
    taken = [f"sources.web.{field}" for field in ("address", "license", "num_documents")]
    taken += [f"sources.{name}.dtype" for name in ("web", "more")]
    assert passed == {
        "made_by": [unknown] * 2,
        **{field: [["made_by", field, *unknown[1:]]] for field in taken},
    }


def test_a_refusal_says_what_is_right(full: tuple[RunningServer, Path, Path], tmp_path: Path) -> None:
    server, bill, _ = full
    made, changed = json.loads(bill.read_text()), tmp_path / "changed.json"
    rows, web = made["sources"]["web"]["used"]["rows"], made["sources"]["web"]
    for sources, said in (
        (
            {"web": {**web, "used": {**web["used"], "rows": 1}}},
            f"web.used.rows: the bill says 1, and it is {rows}",
        ),
        ({"web": {**web, "license": "GPL"}}, 'web.license: the bill says "GPL", and it is "MIT"'),
        ({"code": web}, "code: the bill says"),
        ({"web": {k: v for k, v in web.items() if k != "used"}}, "web.used: the bill lacks it, and it is"),
    ):
        changed.write_text(json.dumps({**made, "sources": {**made["sources"], **sources}}))
        done = run("verify-bill", changed, server.url)
        assert (done.exit_code, f"sources.{said}" in " ".join(done.stderr.split())) == (1, True), done.output


def test_files_know_no_licences(full: tuple[RunningServer, Path, Path], tmp_path: Path) -> None:
    """A bill is checked by paths, which names what they do not know, and refuses the rest."""
    _, bill, path = full
    paths = (f"web={path},eot=0,eot_at=last", f"more={path.with_name('more.bin')}")
    done = run("verify-bill", bill, *paths)
    assert done.exit_code == 0, done.output
    assert "not checked: made_by, sources.web.address, sources.web.license" in done.stdout.splitlines(), (
        done.output
    )
    changed, made = tmp_path / "changed.json", json.loads(bill.read_text())
    made["sources"]["more"]["used"]["tokens"] += 1
    changed.write_text(json.dumps(made))
    done = run("verify-bill", changed, *paths)
    assert (done.exit_code, "sources.more.used.tokens" in done.stderr) == (1, True), done.output
