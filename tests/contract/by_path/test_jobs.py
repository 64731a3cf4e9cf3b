"""Processes of torchrun, srun, mpirun and Ray share the server of a path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from corpus_client import (
    CorpusLoader,
)
from tests.contract.by_path.processes import Corpora, Runtime, expected_lines
from tests.contract.by_path.ranks import GLOBAL_BATCH_SIZE, PLAN, SEQ_LEN
from tests.contract.conftest import Replicas
from tests.serving import environment, wait_until


def test_a_loop_of_torchrun(corpora: Corpora, replicas: Replicas, tmp_path: Path) -> None:
    """By the loader that needs no torch, which each rank would import."""
    script = tmp_path / "train.py"
    script.write_text(
        "import xxhash\n"
        "from corpus_client import ArrayLoader\n"
        f"loader = ArrayLoader({str(corpora['web'].path)!r}, seq_len={SEQ_LEN},\n"
        f"    global_batch_size={GLOBAL_BATCH_SIZE}, seed=7, num_steps=30)\n"
        f"with open(f'{tmp_path}/{{loader.place[0]}}', 'w') as out:\n"
        "    for batch in loader:\n"
        "        print(batch.step, xxhash.xxh3_64_hexdigest(batch.tokens), file=out)\n"
    )
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        str(script),
    ]
    done = subprocess.run(
        words, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for rank in range(4):
        assert (tmp_path / str(rank)).read_text().splitlines() == expected_lines(
            replicas["1 worker"], rank, 4, 30
        )


@pytest.mark.parametrize(
    "variables",
    [
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ],
    ids=["srun", "mpirun"],
)
def test_tasks_of_a_job_share_a_server(
    corpora: Corpora, replicas: Replicas, runtime: Runtime, variables: tuple[str, str, str]
) -> None:
    """Each is a process that knows its rank from its environment alone."""
    script = (
        "import xxhash\n"
        "from corpus_client import ArrayLoader\n"
        f"loader = ArrayLoader({str(corpora['web'].path)!r}, seq_len={SEQ_LEN},\n"
        f"    global_batch_size={GLOBAL_BATCH_SIZE}, seed=7, num_steps=30)\n"
        "for batch in loader:\n"
        "    print(batch.step, xxhash.xxh3_64_hexdigest(batch.tokens))\n"
    )
    rank, size, local = variables
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=environment(**{rank: str(number), size: "3", local: str(number)}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for number, task in enumerate(tasks):
        lines = task.communicate()[0].splitlines()
        assert task.returncode == 0
        assert lines == expected_lines(replicas["1 worker"], number, 3, 30)
    assert len([*runtime.folder.rglob("loaders")]) == 1, "one server for all"
    runtime.check_nothing_left()


def test_actors_of_ray(corpora: Corpora, replicas: Replicas, runtime: Runtime) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed here")

    def run(rank: int, path: str) -> list[str]:
        from corpus_client import Placement

        place = Placement(rank=rank, world_size=2)
        with CorpusLoader(path, **PLAN, dtype=None, device="cpu", num_steps=30, placement=place) as loader:  # type: ignore[arg-type]
            return [f"{batch.step} {xxhash.xxh3_64_hexdigest(batch.tokens.numpy())}" for batch in loader]

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        tasks = [ray.remote(run).remote(rank, str(corpora["web"].path)) for rank in range(2)]
        for rank, lines in enumerate(ray.get(tasks)):
            assert lines == expected_lines(replicas["1 worker"], rank, 2, 30)
        wait_until(lambda: not [*runtime.folder.rglob("socket")], "the server does not end with the tasks")
    finally:
        ray.shutdown()  # kills what its workers have started
