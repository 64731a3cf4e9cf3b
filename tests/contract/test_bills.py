"""Bills of materials: the root is of a naive tree over the steps of the reference; what was changed shows."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from corpus_client import ArrayLoader, TrainedLog
from corpus_client.tools import merkle
from corpus_client.tools.app import app
from corpus_server.catalog import Catalog
from corpus_server.corpus.index import index as make_index
from corpus_server.corpus_spec import CorpusSpec
from tests.conftest import ServedCorpus
from tests.contract.conftest import make_loader
from tests.corpora import some_tokens, write_raw
from tests.layers import loaded_by_command
from tests.metadata import write_metadata
from tests.reference import batch
from tests.serving import RunningServer, run_here

PLAN: dict[str, Any] = {
    "seq_len": 16,
    "seed": 7,
    "stages": [
        {"from_step": 0, "global_batch_size": 12, "mixture": {"web": 0.6, "mixed": 0.4}},
        {"from_step": 9, "global_batch_size": 6, "mixture": {"web": 1.0}, "seq_len": 8},
    ],
    "skip_steps": [[3, 5]],
}
START, STOP = 2, 15

VECTORS = {  # of Certificate Transparency's reference implementation: inputs of leaves, roots of the first n
    "": "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "00": "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "10": "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "2021": "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "3031": "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "40414243": "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "5051525354555657": "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "606162636465666768696a6b6c6d6e6f": "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
}


def sha(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def naive_root(leaves: Sequence[bytes]) -> bytes:
    """The definition of RFC 6962, 2.1."""
    if len(leaves) == 1:
        return leaves[0]
    split = 1
    while 2 * split < len(leaves):
        split *= 2
    return sha(b"\1", naive_root(leaves[:split]), naive_root(leaves[split:]))


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "120", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def made(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bill with its leaves; tests must leave it as it is."""
    folder = tmp_path_factory.mktemp("bill")
    (folder / "plan.json").write_text(json.dumps(PLAN))
    done = run("bill", server.url, "--plan", folder / "plan.json", "--start", START, "--stop", STOP)
    assert done.exit_code == 2, "an option --out is needed"
    out = folder / "bill.json"
    words = ("--plan", folder / "plan.json", "--start", START, "--stop", STOP, "--out", out)
    done = run("bill", server.url, *words, "--cyclonedx", folder / "bom.json", "--spdx", folder / "spdx.json")
    assert done.exit_code == 0, done.output
    return out


def proof_of(made: Path, step: int, folder: Path) -> Path:
    out = folder / f"proof-{step}.json"
    done = run("prove", made, "--step", step, "--out", out)
    assert done.exit_code == 0, done.output
    return out


def test_trees_are_those_of_certificate_transparency() -> None:
    leaves: list[bytes] = []
    for entry, expected in VECTORS.items():
        leaves.append(sha(b"\0", bytes.fromhex(entry)))
        assert merkle.root(leaves).hex() == naive_root(leaves).hex() == expected
    for number in (*range(1, 40), 1000):
        leaves = [sha(b"%d" % k) for k in range(number)]
        root = naive_root(leaves)
        for index in range(number):
            path = merkle.path(leaves, index)
            assert merkle.root_by_path(leaves[index], index, number, path) == root
            assert merkle.root_by_path(leaves[index - 1], index, number, path) != root or number == 1
            assert merkle.root_by_path(leaves[index], index, number, [*path, root]) is None


def test_a_bill_is_of_the_tokens_of_its_steps(made: Path, corpora: dict[str, ServedCorpus]) -> None:
    bill = json.loads(made.read_text())
    shards = {name: corpora[name].shards for name in ("web", "mixed")}
    leaves = []
    for step in range(START, STOP):
        tokens = batch(PLAN, shards, step)[0]
        leaves.append(sha(b"\0", step.to_bytes(8, "big"), sha(tokens.astype("<u4").tobytes())))
    assert bill["tree"]["root"] == naive_root(leaves).hex()
    assert Path(f"{made}.leaves").read_bytes() == b"".join(leaves)
    assert bill["steps"] == [START, STOP]
    used = {name: source["used"]["rows"] for name, source in bill["sources"].items()}
    assert sum(used.values()) == 12 * 5 + 6 * 8  # the batches of steps 2 to 6, and 7 to 14
    assert {name: source["fingerprint"] for name, source in bill["sources"].items()} == bill["plan"][
        "fingerprints"
    ]
    bom = json.loads((made.parent / "bom.json").read_text())
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    assert [each["type"] for each in bom["components"]] == ["data", "data"]
    sets = {each["bom-ref"] for each in bom["components"]}
    card = bom["metadata"]["component"]["modelCard"]["modelParameters"]
    assert {each["ref"] for each in card["datasets"]} == sets == {"corpus:web", "corpus:mixed"}


def test_spdx_has_the_run_and_its_corpora(made: Path) -> None:
    """All elements are listed, and all that are named exist."""
    graph = json.loads((made.parent / "spdx.json").read_text())["@graph"]
    elements = {each["spdxId"]: each for each in graph if "spdxId" in each}
    (document,) = (each for each in elements.values() if each["type"] == "SpdxDocument")
    assert {*document["element"], document["spdxId"]} == set(elements)
    (run_id,) = document["rootElement"]
    bill = json.loads(made.read_text())
    assert elements[run_id]["software_packageVersion"] == bill["plan_id"]
    (trained,) = (each for each in elements.values() if each.get("relationshipType") == "trainedOn")
    assert trained["from"] == run_id
    named = {elements[each]["name"]: elements[each] for each in trained["to"]}
    assert {name: each["software_packageVersion"] for name, each in named.items()} == bill["plan"][
        "fingerprints"
    ]
    entries = elements[run_id]["extension"][0]["extension_cdxProperty"]
    assert {"corpus-server:root", bill["tree"]["root"]} <= {
        each[key] for each in entries for key in ("extension_cdxPropName", "extension_cdxPropValue")
    }


def test_a_bill_says_licences_and_what_was_left_out(tmp_path: Path) -> None:
    """Also one of a plan that continues another one; it needs no server that knows either."""
    path = write_raw(tmp_path / "web.bin", some_tokens(5000))
    served = f"{path},license=CC-BY-4.0 AND MIT,address=https://example.org/web"
    stage = {"from_step": 0, "global_batch_size": 8, "mixture": {"web": 1}}
    with RunningServer({"web": served}, tmp_path) as server:
        plan = server.post_plan({"seq_len": 16, "stages": [stage]}).json()["id"]
        without = {**stage, "from_step": 20, "exclude": {"web": [[100, 140]]}}
        made = server.post_plan({"parent": plan, "stages": [without]}).json()["id"]
        (tmp_path / "plan.json").write_bytes(server.get(f"/v1/plans/{made}/file").body)
        outs = {name: tmp_path / f"{name}.json" for name in ("out", "cyclonedx", "spdx")}
        given = [word for name, each in outs.items() for word in (f"--{name}", each)]
        done = run("bill", server.url, "--plan", tmp_path / "plan.json", "--stop", 40, *given)
        assert done.exit_code == 0, done.output
    bill, bom, spdx = (json.loads(outs[name].read_text()) for name in ("out", "cyclonedx", "spdx"))
    assert bill["excluded"] == [{"from_step": 20, "windows": {"web": 3}}]
    source = bill["sources"]["web"]
    assert (source["license"], source["address"]) == ("CC-BY-4.0 AND MIT", "https://example.org/web")
    (data,) = bom["components"]
    assert data["licenses"] == [{"license": {"name": "CC-BY-4.0 AND MIT"}}]
    assert data["externalReferences"][0]["url"] == "https://example.org/web"
    kinds = {each["type"]: each for each in spdx["@graph"]}
    assert (
        kinds["simplelicensing_LicenseExpression"]["simplelicensing_licenseExpression"] == source["license"]
    )
    assert kinds["dataset_DatasetPackage"]["dataset_datasetSize"] == 10_000
    done = run("verify-bill", outs["out"], f"web={path}")
    assert done.exit_code == 0, done.output


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")
def test_a_bill_is_signed_as_the_docs_say(made: Path, tmp_path: Path) -> None:
    def keygen(*words: object, of: bytes = b"") -> int:
        command = ["ssh-keygen", *map(str, words)]
        return subprocess.run(command, input=of, capture_output=True, check=False).returncode

    key, bill = tmp_path / "key", tmp_path / "bill.json"
    bill.write_bytes(made.read_bytes())
    assert keygen("-q", "-t", "ed25519", "-N", "", "-f", key) == 0
    (tmp_path / "allowed").write_text(f"me@example.org {key.with_suffix('.pub').read_text()}")
    assert keygen("-Y", "sign", "-f", key, "-n", "corpus-bill", bill) == 0
    asked = ("-Y", "verify", "-f", tmp_path / "allowed", "-I", "me@example.org", "-n", "corpus-bill", "-s")
    assert keygen(*asked, f"{bill}.sig", of=bill.read_bytes()) == 0
    assert keygen(*asked, f"{bill}.sig", of=bill.read_bytes().replace(b"sampled", b"simpled")) != 0


def test_each_step_is_proven_by_its_tokens(made: Path, server: RunningServer, tmp_path: Path) -> None:
    for step in (START, 6, 7, STOP - 1):
        proof = proof_of(made, step, tmp_path)
        done = run("verify-bill", made, server.url, "--proof", proof)
        assert (done.exit_code, "is what the bill says" in done.stdout) == (0, True), done.output
    done = run("verify-bill", made, server.url, "--json")
    assert json.loads(done.stdout)["steps"] == [START, STOP]
    done = run("prove", made, "--step", STOP, "--out", tmp_path / "none.json")
    assert done.exit_code == 2
    assert f"[{START}, {STOP})" in done.stderr


def test_no_command_about_bills_imports_torch(made: Path, server: RunningServer, tmp_path: Path) -> None:
    """Nor does an export."""
    steps = (server.url, "--plan", str(made.parent / "plan.json"), "--stop", "3")
    for words in (
        ("bill", *steps, "--out", str(tmp_path / "bill.json")),
        ("prove", str(made), "--step", "6", "--out", str(tmp_path / "proof.json")),
        ("verify-bill", str(made), server.url),
        ("export", *steps, "--out", str(tmp_path / "rows.npy")),
    ):
        assert "torch" not in loaded_by_command(*words), words
    assert {each.name for each in tmp_path.iterdir()} >= {"bill.json", "proof.json", "rows.npy"}


def test_what_was_changed_is_not_proven(made: Path, server: RunningServer, tmp_path: Path) -> None:
    """Another root, another step, a hash of the path, a hash more, a step less, another plan's bill."""
    bill, proof = json.loads(made.read_text()), json.loads(proof_of(made, 6, tmp_path).read_text())
    other_root = {**bill, "tree": {**bill["tree"], "root": "0" * 64}}
    flipped = [*proof["path"][:-1], sha(b"x").hex()]
    wrong: list[tuple[dict[str, Any], dict[str, Any] | None, int, str]] = [
        (other_root, None, 1, "the first step that differs from"),
        (other_root, {**proof, "root": "0" * 64}, 1, "come to the root"),
        (bill, {**proof, "step": 7}, 1, "come to the root"),
        (bill, {**proof, "path": flipped}, 1, "come to the root"),
        (bill, {**proof, "path": [*proof["path"], flipped[-1]]}, 1, "hashes, which no step 6 of 13 has"),
        (bill, {**proof, "root": "0" * 64}, 1, "of another bill: its root"),
        (bill, {**proof, "plan_id": "0" * 64}, 1, "of another bill: its plan_id"),
        (bill, {**proof, "step": 99}, 1, "is of step 99"),
        ({**bill, "steps": [START, STOP - 1]}, None, 1, "the bill says"),
        (bill, {**proof, "by": "me"}, 2, "is no proof of version 1"),
        ({**bill, "plan_id": "0" * 64}, None, 1, "its own document is plan"),
        ({**bill, "plan": {**bill["plan"], "seed": 8}}, None, 1, "its own document is plan"),
        ({"bill": 1}, None, 2, "is no bill of version 1"),
        (bill, {"proof": 2}, 2, "is no proof of version 1"),
    ]
    for number, (changed, its_proof, code, said) in enumerate(wrong):
        path, proof_path = tmp_path / f"bill-{number}.json", tmp_path / f"its-{number}.json"
        path.write_text(json.dumps(changed))
        proof_path.write_text(json.dumps(its_proof))
        Path(f"{path}.leaves").write_bytes(Path(f"{made}.leaves").read_bytes())
        done = run("verify-bill", path, server.url, *(("--proof", proof_path) if its_proof else ()))
        assert (done.exit_code, said in " ".join(done.stderr.split())) == (code, True), (said, done.output)


def test_leaves_that_do_not_fit_the_root_are_refused(
    made: Path, server: RunningServer, tmp_path: Path
) -> None:
    """They stand beside a right bill, and proofs are made of them; without the file nothing is lost."""
    bill, proof, leaves = tmp_path / "bill.json", proof_of(made, 6, tmp_path), tmp_path / "bill.json.leaves"
    bill.write_bytes(made.read_bytes())
    right = Path(f"{made}.leaves").read_bytes()
    for words in ((), ("--proof", proof)):
        for wrong, said in (
            (right[:40] + bytes([right[40] ^ 1]) + right[41:], "comes to the root"),
            (right[:-1], "it is of another bill"),
            (right + b"x" * 32, "it is of another bill"),
            (b"", "it is of another bill"),
        ):
            leaves.write_bytes(wrong)
            done = run("verify-bill", bill, server.url, *words)
            assert (done.exit_code, said in done.stderr) == (1, True), done.output
        leaves.write_bytes(right)
        assert f"{leaves} comes to the bill's root" in run("verify-bill", bill, server.url, *words).stdout
        leaves.unlink()
        done = run("verify-bill", bill, server.url, *words)
        assert (done.exit_code, "leaves" in done.stdout) == (0, False), done.output


def test_one_changed_token_is_found(tmp_path: Path) -> None:
    """By path, where a sampled fingerprint does not see it."""
    tokens = some_tokens(3_000_000)
    path = write_raw(tmp_path / "web.bin", tokens)
    plan = {
        "seq_len": 2048,
        "order": "sequential",
        "stages": [{"from_step": 0, "global_batch_size": 16, "mixture": {"web": 1}}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    bill = tmp_path / "bill.json"
    done = run("bill", path, "--plan", tmp_path / "plan.json", "--stop", 40, "--out", bill)
    assert done.exit_code == 0, done.output
    # Another file: the server of the first one may not have ended yet.
    first, number, other = fingerprint_of(path), 500_001, tmp_path / "other.bin"
    while True:
        changed = tokens.copy()
        changed[number] ^= 1
        write_raw(other, changed)
        if fingerprint_of(other) == first:
            break
        number += 997
    done = run("verify-bill", bill, f"web={other}")
    step = (number - 1) // (16 * 2048)
    assert (done.exit_code, f"is {step}" in done.stderr) == (1, True), (step, done.output)


def test_rows_that_were_exchanged_are_found(tmp_path: Path) -> None:
    """Two rows of one step, by a corpus in which their tokens stand the other way round."""
    tokens = some_tokens(40_000)
    path = write_raw(tmp_path / "web.bin", tokens)
    stage = {"from_step": 0, "global_batch_size": 8, "mixture": {"web": 1}}
    plan = {"seq_len": 31, "stride": 32, "order": "sequential", "stages": [stage]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    bill = tmp_path / "bill.json"
    done = run("bill", path, "--plan", tmp_path / "plan.json", "--stop", 150, "--out", bill)
    assert done.exit_code == 0, done.output
    proof = proof_of(bill, 100, tmp_path)
    changed, other = tokens.reshape(-1, 32).copy(), tmp_path / "other.bin"
    changed[[802, 805]] = changed[[805, 802]]
    found = fingerprint_of(write_raw(other, changed.reshape(-1)))
    assert found != fingerprint_of(path), "so small a file is hashed as a whole"
    done = run("verify-bill", bill, f"web={other}")
    assert (
        done.exit_code,
        "corpus 'web' has other content than the plan was made for" in " ".join(done.stderr.split()),
    ) == (2, True), done.output
    # Whoever forges the fingerprint has another plan; and with its id the tokens still tell.
    made = json.loads(bill.read_text())
    made["plan"]["fingerprints"] = {"web": found}
    made["sources"]["web"]["fingerprint"] = found
    bill.write_text(json.dumps(made))
    done = run("verify-bill", bill, f"web={other}")
    assert (done.exit_code, "its own document is plan" in done.stderr) == (1, True), done.output
    made["plan_id"] = done.stderr.split("is plan ")[1].split()[0]
    bill.write_text(json.dumps(made))
    proof.write_text(json.dumps({**json.loads(proof.read_text()), "plan_id": made["plan_id"]}))
    for words, said in (((), "is 100"), (("--proof", proof), "step 100 and the proof come to the root")):
        done = run("verify-bill", bill, f"web={other}", *words)
        assert (done.exit_code, said in " ".join(done.stderr.split())) == (1, True), done.output


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


def fingerprint_of(path: Path) -> str:
    with Catalog.open([CorpusSpec(name="web", path=path)]) as catalog:
        return catalog.corpus("web").fingerprint


def test_a_bill_that_was_ended_goes_on(made: Path, server: RunningServer, tmp_path: Path) -> None:
    bill = json.loads(made.read_text())
    leaves = Path(f"{made}.leaves").read_bytes()
    out = tmp_path / "bill.json"
    partial = Path(f"{out}.{bill['plan_id'][:16]}-{START}.partial")
    words = ("--plan", made.parent / "plan.json", "--start", START, "--stop", STOP, "--out", out)
    partial.write_bytes(leaves[: 4 * 32 - 1] + b"?" + leaves[4 * 32 : 4 * 32 + 7])
    done = run("bill", server.url, *words)
    assert (done.exit_code, out.exists()) == (2, False)
    assert f"does not hold step {START + 3}; remove it" in " ".join(done.stderr.split())
    partial.write_bytes(leaves[: 4 * 32 + 7])
    done = run("bill", server.url, *words)
    assert done.exit_code == 0, done.output
    assert out.read_bytes() == made.read_bytes()
    assert not partial.exists()
    Path(f"{out}.leaves").write_bytes(leaves[32:])
    done = run("prove", out, "--step", 6, "--out", tmp_path / "proof.json")
    assert (done.exit_code, "does not belong to" in " ".join(done.stderr.split())) == (2, True)
    assert run("bill", server.url, *words).exit_code == 2, "a bill is never written over"


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


@pytest.mark.parametrize("kind", [*KINDS, "continued"])
def test_a_bill_of_each_kind_of_plan_is_of_what_is_served(tmp_path: Path, kind: str) -> None:
    """Root, rows and tokens against the batches of each step; by path, and by a proof."""
    paths, files = {}, {}
    for seed, name in enumerate(("web", "code")):
        tokens = some_tokens(4000, seed=seed) % 500 + 1
        tokens[19::37] = 0
        paths[name] = tmp_path / name
        paths[name].mkdir()
        files[name] = write_raw(paths[name] / "0.bin", tokens)
        make_index(CorpusSpec.parse(f"{paths[name]},eot=0,eot_at=last"))
        write_metadata(paths[name] / "documents", {"site": [f"{n % 20}.org" for n in range(109)]})
    stage = {"from_step": 0, "global_batch_size": 6, "mixture": {"web": 2, "code": 1}}
    document = {"seq_len": 32, "seed": 3, "stages": [stage], **KINDS.get(kind, {})}
    with RunningServer(
        {name: f"{path},eot=0,eot_at=last" for name, path in paths.items()}, tmp_path
    ) as server:
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
    done = run("verify-bill", bill, *(f"{name}={path},eot=0,eot_at=last" for name, path in paths.items()))
    assert done.exit_code == 0, done.output
    if "by" in document.get("family", {}):
        # Elsewhere: the server of the command before may still be there, with the metadata that it has read.
        others = {name: shutil.copytree(path, tmp_path / f"other-{name}") for name, path in paths.items()}
        write_metadata(others["code"] / "documents", {"site": [f"{n % 19}.org" for n in range(109)]})
        done = run(
            "verify-bill", bill, *(f"{name}={path},eot=0,eot_at=last" for name, path in others.items())
        )
        assert done.exit_code == 2, done.output
        assert "the values of column 'site' are others" in " ".join(done.stderr.split())
    changed = np.fromfile(files["code"], np.uint16) + np.uint16(1)
    files["code"].write_bytes(changed.tobytes())
    done = run("verify-bill", bill, *(f"{name}={path},eot=0,eot_at=last" for name, path in paths.items()))
    assert done.exit_code != 0
