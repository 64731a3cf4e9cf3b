"""The controller: two ranks decide alike, a killed run goes on, its decisions are replayed and forked."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import xxhash

from corpus_client import CorpusLoader, Placement
from tests.corpora import some_tokens, write_raw
from tests.examples.running import VOCABULARY, run
from tests.serving import RunningServer

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS, EVERY, AHEAD = 28, 4, 6
RUN = [
    *("--corpora", "even", "odd", "--vocab-size", str(VOCABULARY), "--global-batch-size", "32"),
    *("--steps", str(NUM_STEPS), "--every", str(EVERY), "--ahead", str(AHEAD), "--save-every", "5"),
]

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""What torchrun would tell a single rank, without a process that imports torch to say so."""


def batches(url: str, plan: object, num_steps: int = NUM_STEPS) -> dict[int, list[str]]:
    """Row checksums of each step's global batch, by one process."""
    alone = Placement(rank=0, world_size=1)
    with CorpusLoader(url, plan=plan, num_steps=num_steps, device="cpu", placement=alone) as loader:
        return {
            batch.step: [xxhash.xxh3_64_hexdigest(row.numpy()) for row in batch.tokens.contiguous()]
            for batch in loader
        }


def test_a_killed_run_goes_on_and_its_decisions_are_replayed_and_forked(tmp_path: Path) -> None:
    corpora = {
        "even": write_raw(tmp_path / "even.bin", some_tokens(60_000, vocabulary=8)),
        "odd": write_raw(tmp_path / "odd.bin", some_tokens(60_000, vocabulary=VOCABULARY, seed=1)),
    }
    folder, replayed_in = tmp_path / "run", tmp_path / "replay"
    folder.mkdir()
    replayed_in.mkdir()
    with RunningServer(corpora, tmp_path) as server:
        killed = run(server.url, folder, ranks=2, arguments=RUN, EXAMPLE="online_mixing", KILL_AT="1 17")
        assert killed.code != 0
        assert max(killed.batches) >= 16
        for path in server.state_dir.glob("plans.sqlite*"):  # the checkpoint has all that a server needs
            path.unlink()
        resumed = run(server.url, folder, ranks=2, arguments=RUN, EXAMPLE="online_mixing")
        assert resumed.code == 0, resumed.errors
        assert min(resumed.batches) == 15
        said = re.findall(
            r"^step +(\d+)  loss [\d.]+   even [\d.]+  odd [\d.]+$", resumed.output, re.MULTILINE
        )
        assert said == ["15", "19", "23", "27"]  # a line for each decision, not only for each checkpoint
        state = torch.load(folder / "checkpoint.pt")["data"]
        assert state["next_step"] == NUM_STEPS
        decisions = [json.loads(line) for line in state["plan"]["decisions"].splitlines()]
        assert [from_step for from_step, *_ in decisions] == [
            step + AHEAD for step in range(EVERY, NUM_STEPS + 1, EVERY)
        ]
        even, odd = decisions[-1][1:]
        assert even + odd == 65_536
        assert even < odd  # what has fewer tokens is learned sooner
        trained = {**killed.batches, **resumed.batches}
        assert batches(server.url, state["plan"]) == trained
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps(state["plan"]))
        again = run(
            server.url, replayed_in, "--plan", str(plan), arguments=RUN, EXAMPLE="online_mixing", **ALONE
        )
        assert again.code == 0, again.errors
        assert again.batches == trained
        assert torch.load(replayed_in / "checkpoint.pt")["data"] == state
        fork = {**state["plan"], "decisions": "\n".join(state["plan"]["decisions"].splitlines()[:2])}
        other = {**fork, "decisions": f"{fork['decisions']}\n[18,1,65535]"}
        forked = batches(server.url, other)
        assert {step for step in trained if forked[step] != trained[step]} == set(range(18, NUM_STEPS))
