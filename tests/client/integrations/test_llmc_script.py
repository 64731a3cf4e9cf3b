"""llm.c's own `train_gpt2.py`, with its loader and with ours: the same printed lines.

`CORPUS_LLMC=/path/to/llm.c` names a checkout. Both runs get the same edits, which make the model small and
let two processes train on CPUs. Ours gets two more: the loader, and checkpoints, which llm.c has none of.
"""

from __future__ import annotations

import os
import random
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.client.integrations import test_llmc
from tests.corpora import some_tokens, write_llmc
from tests.serving import ROOT, RunningServer

CHECKOUT = os.environ.get("CORPUS_LLMC")

pytestmark = [
    pytest.mark.skipif(CHECKOUT is None, reason="CORPUS_LLMC names no checkout of llm.c"),
]

VOCABULARY = 512
ROWS, LENGTH = 4, 64
BATCH_TOKENS = ROWS * LENGTH  # of a rank; a step takes four of them, whatever the number of ranks
NUM_ITERATIONS, EVALUATE_EVERY = 30, 10
RUN = [
    *("--model", "d12", "--device", "cpu", "--write_tensors", "0", "--overfit_single_batch", "0"),
    *(
        "--sequence_length",
        str(LENGTH),
        "--total_batch_size",
        str(4 * BATCH_TOKENS),
        "--learning_rate",
        "0.01",
    ),
    *("--num_iterations", str(NUM_ITERATIONS), "--warmup_iters", "5", "--learning_rate_decay_frac", "0.1"),
    *("--val_loss_every", str(EVALUATE_EVERY), "--val_max_steps", "3"),
]

SMALL = {
    "import tiktoken": "pass",  # it would download its tables; without samples nothing asks for them
    'tiktoken.get_encoding("gpt2")': "None",
    "vocab_size=50257, n_layer=12, n_head=12, n_embd=768": (
        f"vocab_size={VOCABULARY}, n_layer=2, n_head=2, n_embd=32"
    ),
}
ON_CPUS = {
    "assert torch.cuda.is_available()": "assert dist.is_available()",
    "backend='nccl'": "backend='gloo'",
    "f'cuda:{ddp_local_rank}'": "'cpu'",
    "torch.cuda.set_device(device)": "pass",
    "model, device_ids=[ddp_local_rank]": "model",
    "lossf, op=dist.ReduceOp.AVG": "lossf.div_(ddp_world_size)",  # gloo has no AVG
}
CHECKPOINTS = {
    "    for step in range(args.num_iterations + 1):\n": """\
    first_step = 0
    if path := os.environ.get("RESUME"):
        saved = torch.load(path)
        raw_model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_step = saved["step"]
        train_loader.load_state_dict(saved["data"], trained_steps=first_step * grad_accum_steps)
    for step in range(first_step, args.num_iterations + 1):
        if master_process and not path:  # ranks that resume may still be reading
            saved = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save({**saved, "data": train_loader.state_dict()}, f"checkpoint-{step}.pt")
"""
}
"""At the loop's head. Each micro batch is fetched where it is trained on, so `state_dict` counts no other."""

OUR_LOADER = "from examples.for_llmc import DistributedDataLoader\n"
THEIR_LOADER = re.compile(r"class DistributedDataLoader:\n(?:    .*\n|\n)+")


def script(path: Path, *, ours: bool) -> Path:
    """Write the checkout's script with its edits."""
    assert CHECKOUT is not None
    text = Path(CHECKOUT, "train_gpt2.py").read_text()
    if ours:
        text, count = THEIR_LOADER.subn(OUR_LOADER, text)
        assert count == 1
    for old, new in {**SMALL, **ON_CPUS, **(CHECKPOINTS if ours else {})}.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)
    return path


@dataclass(frozen=True)
class Scripts:
    """Both scripts, and what their corpora are named after: a folder, a server's URL."""

    folder: Path
    url: str

    def theirs(self, corpus: str) -> list[str]:
        """Return script and corpora of a run with llm.c's loader."""
        return [f"{self.folder}/theirs.py", *_corpora(f"{self.folder}/", corpus, "/*.bin")]

    def ours(self, corpus: str) -> list[str]:
        """Return script and corpora of a run with our loader."""
        return [f"{self.folder}/ours.py", *_corpora(f"{self.url}/", corpus, "")]


def _corpora(before: str, corpus: str, after: str) -> list[str]:
    return ["--input_bin", f"{before}{corpus}{after}", "--input_val_bin", f"{before}val{after}"]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    """Make them beside a server of the files that llm.c's loader reads.

    whole   two shards of whole batches and one token: with one rank llm.c's loader drops nothing of them; a
            run reads each once, and most of the first one again
    long    one shard that outlasts a run, for two ranks: they change shards at different steps
    """
    folder = tmp_path_factory.mktemp("llmc")
    sizes = {"whole": (40, 24), "long": (124,), "val": (8,)}
    for name, batches in sizes.items():
        (folder / name).mkdir()
        for number, count in enumerate(batches):
            tokens = some_tokens(count * BATCH_TOKENS + 1, vocabulary=VOCABULARY, seed=count)
            write_llmc(folder / name / f"{number}.bin", tokens)
    script(folder / "theirs.py", ours=False)
    script(folder / "ours.py", ours=True)
    with RunningServer({name: folder / name for name in sizes}, folder) as server:
        yield Scripts(folder, server.url)


def run(
    arguments: list[str], folder: Path, *more: str, ranks: int, rows: int = ROWS, resume: str = ""
) -> list[str]:
    """Run a script in `folder` to its end; return the lines with losses, without times."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "client")])
    done = subprocess.run(
        [
            sys.executable,
            *(torchrun if ranks > 1 else ()),
            *arguments,
            *RUN,
            "--batch_size",
            str(rows),
            *more,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RESUME": resume},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return re.findall(r"^(val loss .*|step .* lr \S+)", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(("corpus", "ranks"), [("whole", 1), ("long", 2)])
def test_the_lines_are_those_of_its_own_loader_also_after_a_resume_at_any_step(
    scripts: Scripts, tmp_path: Path, corpus: str, ranks: int
) -> None:
    expected = run(scripts.theirs(corpus), tmp_path, ranks=ranks)
    assert len(set(expected)) == NUM_ITERATIONS + NUM_ITERATIONS // EVALUATE_EVERY + 1
    assert run(scripts.ours(corpus), tmp_path, ranks=ranks) == expected
    for step in random.Random(ranks).sample(range(1, NUM_ITERATIONS), 3):
        lines_before = step + -(-step // EVALUATE_EVERY)  # a step's evaluation is printed before the step
        resumed = run(scripts.ours(corpus), tmp_path, ranks=ranks, resume=f"checkpoint-{step}.pt")
        assert resumed == expected[lines_before:]


def test_one_rank_goes_on_after_two(scripts: Scripts, tmp_path: Path) -> None:
    """With twice the rows; other sums of floats make other last digits.

    An evaluation prints the loss of rank 0 alone, so only losses of training are those of the whole batch.
    """
    step = NUM_ITERATIONS - 5
    whole = train_losses(run(scripts.ours("long"), tmp_path, ranks=2))
    resumed = run(scripts.ours("long"), tmp_path, ranks=1, rows=2 * ROWS, resume=f"checkpoint-{step}.pt")
    assert len(train_losses(resumed)) == 5
    assert train_losses(resumed) == pytest.approx(whole[step:], abs=1e-5)


def train_losses(lines: list[str]) -> list[float]:
    return [float(line.split("train loss ")[1].split()[0]) for line in lines if "train loss" in line]


def test_a_single_batch_over_and_over(scripts: Scripts, tmp_path: Path) -> None:
    """The script's default: it resets its loader before each step."""
    more = ("--overfit_single_batch", "1", "--num_iterations", "8")
    expected = run(scripts.theirs("whole"), tmp_path, *more, ranks=1)
    assert run(scripts.ours("whole"), tmp_path, *more, ranks=1) == expected


@pytest.mark.filterwarnings("default")  # torch's Inductor, which the script imports, warns
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [1000, 1025])
def test_what_the_suite_takes_for_its_loader_does_as_it_does(
    tmp_path: Path, world_size: int, num_tokens: int
) -> None:
    """In a shard that ends within a batch, and in one of sixteen batches of a rank and one token."""
    module = runpy.run_path(str(Path(str(CHECKOUT), "train_gpt2.py")))
    tokens = some_tokens(num_tokens, vocabulary=VOCABULARY)
    for name in ("0.bin", "1.bin"):
        write_llmc(tmp_path / name, tokens)
    for rank in range(world_size):
        loader = module["DistributedDataLoader"](
            f"{tmp_path}/*.bin", test_llmc.ROWS, test_llmc.SEQ_LEN, rank, world_size
        )
        for x, y in test_llmc.by_llmc(tokens, rank, world_size):
            assert loader.current_shard == 0
            found_x, found_y = loader.next_batch()
            assert torch.equal(found_x, x)
            assert torch.equal(found_y, y)
        assert loader.current_shard == 1
