"""Bills of materials: their root is of a naive tree over the steps of the reference; what they say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from corpus_client.tools import merkle
from tests.conftest import ServedCorpus
from tests.contract.bills.making import PLAN, START, STOP, naive_root, run, sha
from tests.corpora import some_tokens, write_raw
from tests.layers import loaded_by_command
from tests.reference import batch
from tests.serving import RunningServer, environment

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


def limited(blocks: int, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a command whose files may have so many blocks of 512 bytes, as on a disk that is full then."""
    shell = ["sh", "-c", 'ulimit -f "$0" && exec "$@"', str(blocks), sys.executable, "-m", "corpus_client"]
    command = [*shell, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)


@pytest.mark.parametrize("out", ["none/x", "file/x", "n" * 300, "full"])
@pytest.mark.parametrize("command", ["bill", "prove", "export"])
def test_a_file_that_cannot_be_written_leaves_nothing(
    made: Path, server: RunningServer, tmp_path: Path, command: str, out: str
) -> None:
    (tmp_path / "file").touch()
    plan = ("--plan", made.parent / "plan.json", "--start", START, "--stop", STOP)
    given = ("prove", made, "--step", START) if command == "prove" else (command, server.url, *plan)
    done = limited(0 if out == "full" else 1000, *given, "--out", tmp_path / out)
    assert (done.returncode, done.stdout) == (2, "")
    line = done.stderr.splitlines()[-1]  # the loader may warn before
    assert line.startswith(f"error: {tmp_path / out}")
    assert (" cannot be written: " in line, "Traceback" in done.stderr) == (True, False)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_bill_goes_on_where_its_documents_found_no_room(
    made: Path, server: RunningServer, tmp_path: Path
) -> None:
    """All of its files come together, or none; the leaves of hours are not lost."""
    plan = ("--plan", made.parent / "plan.json", "--start", START, "--stop", STOP)
    words = ("bill", server.url, *plan, "--out", tmp_path / "b", "--cyclonedx", tmp_path / "c")
    done = limited(1, *words)
    assert done.returncode == 2
    assert f"error: {tmp_path / 'c'} cannot be written: File too large" in done.stderr
    (partial,) = tmp_path.iterdir()
    assert partial.name.endswith(".partial")
    assert partial.read_bytes() == Path(f"{made}.leaves").read_bytes()
    assert run(*words).exit_code == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["b", "b.leaves", "c"]
    assert (tmp_path / "b").read_bytes() == made.read_bytes()
