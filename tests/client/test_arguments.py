"""A loader's arguments: what is refused at construction, and where defaults come from."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from corpus_client import CorpusLoader, Network, Placement, errors, get_batch
from corpus_client.plan.world import find_rank, ranks_on_host
from tests.client.reference_server import ReferenceServer
from tests.loaders import grouped

MakeLoader = Callable[..., CorpusLoader]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"corpus": 5}, "corpus must name"),
        ({"seq_len": 0}, r"seq_len must be an integer in \[1, 1048576\], got 0"),
        ({"seq_len": True}, "seq_len must be an integer"),
        ({"global_batch_size": None}, "global_batch_size must be an integer"),
        ({"seed": -1}, "seed must be"),
        ({"num_steps": 1.5}, "num_steps must be"),
        ({"dtype": torch.float32}, "dtype must be torch.int64, torch.int32 or None"),
        ({"eot_id": -1}, r"eot_id of uint16 tokens must be an integer in \[0,"),
        ({"eot_id": 65536}, r"\[0, 65535\], got 65536"),
        ({"ignore_index": -100}, "ignore_index needs eot_id="),
        ({"ignore_index": -100, "eot_id": 5, "dtype": None}, "ignore_index needs dtype="),
        ({"ignore_index": 1.5, "eot_id": 5}, "ignore_index must be an integer"),
        ({"ignore_index": 0, "eot_id": 5}, r"ignore_index must be no token id, .* as -100, got 0"),
        ({"ignore_index": 5, "eot_id": 5}, r"ignore_index must be no token id"),
        ({"ignore_index": 65535, "eot_id": 5}, r"ignore_index must be no token id"),
        ({"run": "a", "network": Network(headers={"corpus-run": "b"})}, "run= and a Corpus-Run header say"),
        ({"reiterable": "no"}, "reiterable must be True or False, got 'no'"),
        ({"sources": "no"}, "sources must be True or False, got 'no'"),
        ({"loss_mask": "no"}, "loss_mask must be True, False or None, got 'no'"),
        ({"loss_mask": 0}, "loss_mask must be True, False or None, got 0"),
        ({"nvtx": "no"}, "nvtx must be True or False, got 'no'"),
        ({"family": "x"}, "family must be a mapping, .*got 'x'"),
        ({"family": {}}, "family must be a mapping, .*got {}"),
        ({"network": Network(ca_file="ca.pem")}, r"ca_file= is for https://.*, got it with http://"),
        ({"network": Network(cert_file="a.pem", key_file="b.pem")}, r"cert_file= is for https://"),
        ({"urls": "uds:///tmp/a.sock", "network": Network(ca_file="ca.pem")}, r"got it with uds:///tmp/a"),
        ({"trace_steps": -1}, "trace_steps must be"),
        ({"prefetch_bytes": 1e6}, "prefetch_bytes must be an integer"),
        ({"local_root": 5}, "local_root must be the path of a folder, or a mapping of .*, got 5"),
        ({"local_root": ""}, "local_root must be the path of a folder, or a mapping of .*, got ''"),
        ({"local_root": {"web": ""}}, "local_root of 'web' must be the path of a folder, got ''"),
        ({"record_dir": ""}, "record_dir must be the path of a folder, got ''"),
        ({"rank": 2, "world_size": 2}, r"rank must be an integer in \[0, 1\], got 2"),
        ({"world_size": 5}, "divides over 1, 2, 3, 4, 6, 12"),
        (
            {"prefetch_bytes": 100},
            "prefetch_bytes must hold two batches of 408 bytes .*8,192 in all, got 100",
        ),
        ({"plan": {}}, "plan= must come without corpus, seq_len, global_batch_size"),
        ({"urls": []}, "urls must name at least one server"),
        ({"device": "meta"}, "device must be"),
        ({"device": True}, "device must be 'cpu' or an accelerator that torch sees here, got 'True'"),
        ({"device": [0]}, r"device must be 'cpu' or an accelerator that torch sees here, got '\[0\]'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused_at_construction(
    server: ReferenceServer, change: dict[str, Any], message: str
) -> None:
    good = {
        "urls": server.url,
        "corpus": "web",
        "seq_len": 16,
        "global_batch_size": 12,
        "rank": 0,
        "world_size": 1,
    }
    with pytest.raises(errors.InvalidArgument, match=message):
        CorpusLoader(**grouped({**good, **change}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rank", r"rank is passed as placement=Placement\(rank=...\)"),
        ("prefetch_bytes", r"prefetch_bytes is passed as staging=Staging\(prefetch_bytes=...\)"),
        ("deadline_seconds", r"passed as network=Network\(deadline_seconds=...\)"),
        ("batch_size", "there is no argument batch_size; pass global_batch_size="),
        ("mixture", "there is no argument mixture; pass corpus={NAME: weight"),
        ("seqlen", "there is no argument seqlen; did you mean seq_len?"),
        ("zzz", "there is no argument zzz$"),
    ],
)
def test_an_argument_of_another_name_gets_a_hint(name: str, message: str) -> None:
    unknown: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=message):
        CorpusLoader("localhost:1", corpus="web", seq_len=16, global_batch_size=12, **unknown)


def test_the_scheme_of_a_url_may_be_left_out(server: ReferenceServer) -> None:
    options: dict[str, Any] = {"corpus": "web", "seq_len": 16, "global_batch_size": 12, "device": "cpu"}
    with CorpusLoader(server.url.removeprefix("http://"), **options) as loader:
        assert next(loader).step == 0


def test_unknown_corpus_is_the_servers_word(make_loader: MakeLoader) -> None:
    with pytest.raises(errors.UnknownCorpus, match="no corpus is named 'webb'"):
        make_loader(corpus="webb")


def test_rank_comes_from_argument_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert find_rank(None, None) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(errors.InvalidArgument, match="RANK and WORLD_SIZE must both be set"):
        find_rank(None, None)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert find_rank(None, None) == (3, 8)
    assert find_rank(1, 2) == (1, 2)


LAUNCHERS = [
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("MVP_COMM_WORLD_RANK", "MVP_COMM_WORLD_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("PALS_RANKID", "PMI_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
]
SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "-5"}
"""What the shell of a job's script has."""
SALLOC = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
}
"""What the shell of `salloc --ntasks=4` has."""
TASK = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
ONE = {"RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {name for pair in LAUNCHERS for name in pair} | {"RANK", "WORLD_SIZE", "LOCAL_RANK"}
    for name in names | {"LOCAL_WORLD_SIZE", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID"}:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("names", LAUNCHERS)
@pytest.mark.usefixtures("no_launcher")
def test_ranks_come_from_what_started_the_processes_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, names: tuple[str, str]
) -> None:
    for name, value in zip(names, ("2", "4"), strict=True):
        monkeypatch.setenv(name, value)
    with caplog.at_level("INFO"):
        assert find_rank(None, None) == (2, 4)
    assert f"rank 2 of 4, by {names[0]}=2 {names[1]}=4" in caplog.text
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")  # torchrun, started by srun or mpirun once a node
    assert find_rank(None, None) == (5, 8)
    assert find_rank(1, 2) == (1, 2)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({"LOCAL_RANK": "1"}, None),
        ({"LOCAL_RANK": "0"}, None),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, None),
        ({"LOCAL_WORLD_SIZE": "2"}, None),
        ({**SCRIPT, "LOCAL_RANK": "1"}, None),
        ({"LOCAL_RANK": "-1"}, (0, 1)),  # how some say that there is none
        ({**ONE, "LOCAL_RANK": "0"}, (0, 1)),
        ({**ONE, "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"RANK": "0", "WORLD_SIZE": "4", "PMI_RANK": "2", "PMI_SIZE": "4"}, None),
        ({"PMI_RANK": "x", "PMI_SIZE": "4"}, None),
        # A rank without a number of ranks
        ({"OMPI_COMM_WORLD_RANK": "1"}, None),
        ({"PMI_RANK": "1"}, None),
        ({"SLURM_PROCID": "1"}, None),
        ({"OMPI_COMM_WORLD_RANK": "0"}, None),
        ({"PMI_RANK": "0"}, None),
        ({"PMI_RANK": "0", "SLURM_PROCID": "0"}, None),
        ({**SCRIPT, "PMI_RANK": "0"}, None),
        ({**SCRIPT, "PMI_RANK": "1"}, None),
        ({"PMIX_RANK": "0"}, None),
        ({"PMIX_RANK": "1"}, None),
        ({"PALS_RANKID": "1"}, None),
        ({"MV2_COMM_WORLD_RANK": "1"}, None),
        ({"FLUX_TASK_RANK": "1"}, None),
        ({**ONE, "PMIX_RANK": "1"}, None),
        ({**ONE, "FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1"}, (1, 4)),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "PALS_RANKID": "1"}, (1, 4)),
        ({**TASK, "PMIX_RANK": "2"}, (2, 4)),  # srun --mpi=pmix
        ({**SALLOC, "PMIX_RANK": "0"}, (0, 1)),  # srun --mpi=pmix --pty bash
        ({**ONE, "PMI_RANK": "0"}, (0, 1)),
        ({"PMI_RANK": "-1"}, (0, 1)),
        ({**ONE, "SLURM_PROCID": "3"}, None),
        ({"RANK": "5", "WORLD_SIZE": "8", "PMI_RANK": "1"}, (5, 8)),
        # Tasks of srun
        (TASK, (2, 4)),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, (1, 2)),
        ({**TASK, "SLURM_NTASKS": "16"}, (2, 4)),  # srun --preserve-env --ntasks=4 in a job of 16
        ({**ONE, **TASK}, None),
        ({**ONE, "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, None),
        ({"RANK": "0", "WORLD_SIZE": "4", **TASK}, None),
        ({"RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "7", **TASK}, (0, 4)),  # one process a node
        ({**ONE, "TORCHELASTIC_RUN_ID": "7", **TASK}, None),  # torchrun --standalone in each task
        ({"RANK": "17", "WORLD_SIZE": "32", "TORCHELASTIC_RUN_ID": "7", **TASK}, (17, 32)),
        # The shell of a job's script or of salloc: python, torchrun, mpirun
        ({"SLURM_PROCID": "0"}, (0, 1)),
        (SCRIPT, (0, 4)),
        (SALLOC, (0, 1)),
        ({"SLURM_NTASKS": "4"}, (0, 1)),
        ({**ONE, **SCRIPT}, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4", **SCRIPT}, (2, 4)),
        ({"RANK": "2", "WORLD_SIZE": "4", **SALLOC}, (2, 4)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", **SCRIPT}, (2, 4)),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", **SALLOC}, (2, 4)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_launcher")
def test_an_environment_that_contradicts_itself_is_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], place: tuple[int, int] | None
) -> None:
    """Else several processes would read the same rows without a word."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if place is not None:
        assert find_rank(None, None) == place
        return
    with pytest.raises(errors.InvalidArgument, match=r"contradict each other|one of several|must both be"):
        find_rank(None, None)


@pytest.mark.usefixtures("no_launcher")
def test_a_rank_without_a_size_is_refused_with_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(
        errors.InvalidArgument, match=r"PMI_RANK=1 without PMI_SIZE, LOCAL_RANK=0: .* set RANK and WORLD_SIZE"
    ):
        find_rank(None, None)
    assert find_rank(0, 1) == (0, 1)


@pytest.mark.usefixtures("no_launcher")
def test_a_place_in_the_script_of_a_job_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of `sbatch` without `--ntasks`, where nothing else tells the script from a task."""
    monkeypatch.setenv("SLURM_PROCID", "0")
    with caplog.at_level("INFO"):
        assert find_rank(None, None) == (0, 1)
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("INFO", "rank 0 of 1, by SLURM_PROCID=0 without SLURM_NTASKS; placement= says otherwise")
    ]


def test_ranks_are_as_many_as_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_on_host(otherwise=4) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ranks_on_host(otherwise=4) == 8


def test_torch_distributed_goes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    import torch.distributed as distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert find_rank(None, None) == (0, 1)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"network": {"deadline_seconds": 5}},
            r"network must be a Network, got a dict; pass network=Network",
        ),
        ({"staging": 7}, "staging must be a Staging, got a int"),
        ({"placement": (0, 1)}, "placement must be a Placement, got a tuple"),
        ({"urls": 7}, "url must be http://host:port.*, got 7"),
        ({"urls": [None]}, "url must be http://host:port.*, got None"),
        ({"urls": b"http://data"}, "url must be http://host:port.*, got b'http://data'"),
        ({"urls": ""}, "url must be http://host:port.*, got ''"),
        ({"urls": (each for each in "ab")}, "url must be http://host:port.*, got <generator"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_of_another_type_is_refused_by_name(
    server: ReferenceServer, change: dict[str, Any], message: str
) -> None:
    good = {"urls": server.url, "corpus": "web", "seq_len": 16, "global_batch_size": 12}
    with pytest.raises(errors.InvalidArgument, match=message):
        CorpusLoader(**{**good, **change})


def test_integers_of_numpy_are_integers_and_states_stay_json(server: ReferenceServer) -> None:
    """Seeds and steps are drawn and counted with NumPy."""
    i64: Any = np.int64  # a type checker knows only integers of Python
    plan: dict[str, Any] = {
        "corpus": "web",
        "seq_len": np.int32(16),
        "global_batch_size": np.uint16(12),
        "seed": i64(7),
    }
    place = Placement(rank=i64(1), world_size=i64(2), step_stride=i64(2))
    with CorpusLoader(server.url, device="cpu", num_steps=i64(9), placement=place, **plan) as loader:
        loader.seek(i64(3))
        batch = next(loader)
        states = [batch.state_after(), loader.state_dict(), loader.state_at(i64(4))]
        assert [json.loads(json.dumps(state))["next_step"] for state in states] == [5, 5, 4]
        loader.load_state_dict({**states[2], "next_step": i64(4)}, trained_steps=i64(4))
        assert (next(loader).step, len(loader)) == (4, 9)
    data = np.arange(100, dtype=np.uint16)
    assert get_batch(data, i64(2), i64(4))[0].shape == (2, 4)
