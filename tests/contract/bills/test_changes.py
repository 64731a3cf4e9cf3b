"""What was changed in a bill, a proof, leaves, tokens or rows is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.contract.bills.making import START, STOP, fingerprint_of, proof_of, run, sha
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer


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
