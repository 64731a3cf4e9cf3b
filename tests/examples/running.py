"""Runs of the training example: its command lines, and what it recorded of every batch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.serving import ROOT

VOCABULARY = 64
SMALL = ["--vocab-size", str(VOCABULARY), "--seq-len", "16", "--layers", "1", "--heads", "2", "--width", "16"]
NUM_STEPS, SAVE_EVERY, EVAL_EVERY, EVAL_STEPS = 12, 3, 6, 2
RUN = [
    *("--corpus", "train", "--eval-corpus", "other", *SMALL, "--global-batch-size", "8", "--log-every", "1"),
    *("--warmup-steps", "2", "--steps", str(NUM_STEPS), "--save-every", str(SAVE_EVERY)),
    *("--eval-every", str(EVAL_EVERY), "--eval-steps", str(EVAL_STEPS), "--device", "cpu"),
]


@dataclass(frozen=True)
class Finished:
    """A run of the example that has ended.

    Args:
        batches: row checksums of each step's global batch that was trained on, by step.
        evaluated: (step, row checksums of the global batch) in the order that evaluations saw them.
        losses, other_losses: printed, by step: of training and of evaluation.
    """

    code: int
    output: str
    errors: str
    batches: dict[int, list[str]] = field(default_factory=dict)
    evaluated: list[tuple[int, list[str]]] = field(default_factory=list)

    @property
    def losses(self) -> dict[int, float]:
        return self._printed(r"tokens/s")

    @property
    def other_losses(self) -> dict[int, float]:
        return self._printed(r"on other")

    def _printed(self, behind: str) -> dict[int, float]:
        found = re.findall(rf"^step +(\d+) +loss +([\d.]+) .*{behind}", self.output, re.MULTILINE)
        return {int(step): float(loss) for step, loss in found}


def command(url: str, folder: Path, *flags: str, ranks: int, arguments: Sequence[str] = RUN) -> list[str]:
    driver = str(Path(__file__).with_name("recorded.py"))
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    )
    return [
        sys.executable,
        *launcher,
        driver,
        url,
        *arguments,
        "--checkpoint",
        str(folder / "checkpoint.pt"),
        *flags,
    ]


def environment(record: Path, **variables: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "client")])
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": path}
    return {**os.environ, **quiet, "RECORD": str(record), **variables}


def run(
    url: str,
    folder: Path,
    *flags: str,
    ranks: int = 1,
    arguments: Sequence[str] = RUN,
    **variables: str,
) -> Finished:
    """Run an example with its checkpoint in `folder`, to its end."""
    record = folder / f"record-{len(list(folder.iterdir()))}"
    record.mkdir(parents=True)
    done = subprocess.run(
        command(url, folder, *flags, ranks=ranks, arguments=arguments),
        env=environment(record, **variables),
        capture_output=True,
        text=True,
        check=False,
    )
    finished = Finished(done.returncode, done.stdout, done.stderr)
    by_rank = [
        [json.loads(line) for line in (record / f"{rank}.jsonl").read_text().splitlines()]
        for rank in range(ranks)
    ]
    for parts in zip(*by_rank, strict=False):  # a killed rank has fewer
        assert len({part["step"] for part in parts}) == 1
        rows = [row for part in parts for row in part["rows"]]
        if parts[0]["corpora"] != ["other"]:
            finished.batches[parts[0]["step"]] = rows
        else:
            finished.evaluated.append((parts[0]["step"], rows))
    return finished
