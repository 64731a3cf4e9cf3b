"""Who gets which part: rank and world size, device meshes, slices of the sequence."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corpus_client import CorpusLoader, Network, errors
from corpus_client.plan.world import Context, Placement, RankPart, mesh_rank
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step
from tests.client.reference_server import ReferenceServer

MakeLoader = Callable[..., CorpusLoader]


@dataclass(frozen=True)
class FakeMesh:
    """The arithmetic needs three facts of a mesh, and no processes."""

    mesh_dim_names: tuple[str, ...] | None
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self.coordinate


NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SHAPE = (2, 2, 3, 2, 2)
HERE = FakeMesh(NAMES, SHAPE, (1, 1, 2, 0, 1))


def place(rank: int, world_size: int, context: tuple[int, int] = (0, 1), *, zigzag: bool = False) -> RankPart:
    return RankPart(rank, world_size, Context(*context, zigzag))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"rank": 1, "world_size": 2}, place(1, 2)),
        ({"rank": 0, "world_size": 2, "context_parallel": (1, 4)}, place(0, 2, (1, 4))),
        ({"mesh": HERE, "data_dims": ("dp_replicate", "dp_shard")}, place(5, 6)),
        ({"mesh": HERE, "data_dims": ("dp_shard", "dp_replicate")}, place(5, 6)),
        ({"mesh": HERE, "data_dims": "dp_shard"}, place(2, 3)),
        ({"mesh": HERE, "data_dims": ()}, place(0, 1)),
        ({"mesh": HERE, "data_dims": ["dp_shard"], "context_dim": "cp"}, place(2, 3, (0, 2))),
        ({"mesh": HERE, "data_dims": ["dp_shard"], "context_parallel": (1, 2)}, place(2, 3, (1, 2))),
        (
            {"rank": 0, "world_size": 2, "context_parallel": (1, 4), "context_order": "zigzag"},
            place(0, 2, (1, 4), zigzag=True),
        ),
        ({"rank": 0, "world_size": 2, "context_order": "zigzag"}, place(0, 2)),
    ],
)
def test_place_is_read_from_whatever_says_it(arguments: dict[str, Any], expected: RankPart) -> None:
    assert Placement(**arguments).find() == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 1}, "rank and world_size must be given together, got rank=1"),
        ({"rank": 2, "world_size": 2}, r"rank must be an integer in \[0, 1\], got 2"),
        ({"step_stride": 0}, "step_stride must be"),
        ({"rank": True, "world_size": 2}, "rank must be an integer .* got True"),
        ({"rank": 0.0, "world_size": 2}, r"rank must be an integer .* got 0\.0"),
        ({"context_parallel": (2, 2)}, "context_parallel's rank must be an integer in"),
        ({"context_order": "ring"}, "context_order must be contiguous or zigzag or documents, got 'ring'"),
        ({"context_parallel": 2}, r"context_parallel must be \(rank, world size\), got 2"),
        ({"context_parallel": (0, 2), "context_dim": "cp"}, "say the same; give one"),
        ({"context_dim": "cp"}, "need mesh="),
        ({"data_dims": "dp"}, "need mesh="),
        ({"mesh": HERE}, r"data_dims must name the mesh's data dimensions, out of \['pp', 'dp_rep"),
        ({"mesh": HERE, "data_dims": "dp"}, r"the mesh's dimensions are \['pp', .*'tp'\], got 'dp'"),
        ({"mesh": HERE, "data_dims": "dp_shard", "context_dim": "sp"}, "got 'sp'"),
        ({"mesh": HERE, "data_dims": "dp_shard", "context_dim": "dp_shard"}, "must not be a data dimension"),
        ({"mesh": HERE, "data_dims": ("tp", "tp")}, "each dimension once"),
        ({"mesh": HERE, "data_dims": "tp", "rank": 0, "world_size": 1}, "mesh and rank say the same"),
        ({"mesh": HERE, "data_dims": 7}, "data_dims must name dimensions of the mesh, got 7"),
        ({"mesh": HERE, "data_dims": [["tp"]]}, r"data_dims must name dimensions of the mesh, got \[\['tp'"),
        ({"mesh": 7}, "mesh must be a DeviceMesh, got 7"),
        ({"mesh": "dp", "data_dims": "dp"}, "mesh must be a DeviceMesh, got 'dp'"),
        ({"mesh": FakeMesh(None, (2,), (0,)), "data_dims": "dp"}, "make it with mesh_dim_names="),
        ({"mesh": FakeMesh(("dp",), (2,), None), "data_dims": "dp"}, "must contain this process"),
    ],
)
def test_contradictions_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        Placement(**arguments).find()


@pytest.mark.parametrize("dims", [("dp_replicate", "dp_shard"), ("dp_shard", "dp_replicate"), ("cp",), NAMES])
def test_ranks_along_dimensions_are_each_once_and_ignore_the_others(dims: tuple[str, ...]) -> None:
    by_coordinate: dict[tuple[int, ...], int] = {}
    for coordinate in itertools.product(*map(range, SHAPE)):
        rank, size = mesh_rank(FakeMesh(NAMES, SHAPE, coordinate), dims)
        assert size == math.prod(SHAPE[NAMES.index(name)] for name in dims)
        mine = tuple(coordinate[NAMES.index(name)] for name in dims)
        assert by_coordinate.setdefault(mine, rank) == rank
    assert [by_coordinate[mine] for mine in sorted(by_coordinate)] == list(range(len(by_coordinate)))


def test_context_slices_come_by_the_same_requests(
    make_loader: MakeLoader, server: ReferenceServer, corpus: ReferenceCorpus
) -> None:
    """Each rank receives the whole window, so that one cached response serves them all."""
    paths, parts = [], []
    for rank in range(4):
        server.paths.clear()
        loader = make_loader(context_parallel=(rank, 4), eot_id=7, num_steps=5)
        parts.append(list(loader))
        paths.append(sorted(server.paths))  # two are in flight: they may arrive in another order
        assert loader.stats().num_tokens == 5 * 12 * 4
    assert paths == 4 * [paths[0]]
    for step, batches in enumerate(zip(*parts, strict=True)):
        expected = torch.from_numpy(tokens_of_step(corpus, loader.plan, step).astype(np.int64))
        assert all(batch.inputs.shape == (12, 4) for batch in batches)
        assert torch.equal(torch.cat([batch.inputs for batch in batches], dim=1), expected[:, :-1])
        assert torch.equal(torch.cat([batch.targets for batch in batches], dim=1), expected[:, 1:])
        assert all(batch.inputs.is_contiguous() and batch.targets.is_contiguous() for batch in batches)


@pytest.mark.parametrize("dtype", [torch.int64, None])
def test_zigzag_ranks_have_one_chunk_from_either_half(
    make_loader: MakeLoader, corpus: ReferenceCorpus, dtype: torch.dtype | None
) -> None:
    """Rank r of 4 has chunks r and 7 - r of 8, two tokens each; `next_into` and `peek` give the same."""
    for rank in range(4):
        columns = [2 * chunk + at for chunk in (rank, 7 - rank) for at in range(2)]
        loader = make_loader(
            context_parallel=(rank, 4), context_order="zigzag", eot_id=7, num_steps=4, dtype=dtype
        )
        inputs, targets = torch.empty(2, 12, 4, dtype=torch.int64)
        for step in range(4):
            whole = tokens_of_step(corpus, loader.plan, step).astype(np.int64)
            peeked = loader.peek(step)
            batch = next(loader) if step % 2 else loader.next_into(inputs, targets)
            assert peeked.tokens.tolist() == whole.tolist()
            for found in (batch, peeked):
                assert found.inputs.tolist() == whole[:, columns].tolist()
                assert found.targets.tolist() == whole[:, [column + 1 for column in columns]].tolist()
            assert torch.equal(peeked.loss_mask, peeked.inputs.to(torch.int64) != 7)


def test_a_sequence_that_does_not_divide_is_refused(make_loader: MakeLoader) -> None:
    with pytest.raises(errors.InvalidArgument, match="context-parallel size, got 16 over 3"):
        make_loader(context_parallel=(0, 3))
    with pytest.raises(errors.InvalidArgument, match="twice the context-parallel size, got 8 over 16"):
        make_loader(context_parallel=(0, 8), context_order="zigzag", seq_len=8)


CASES: list[tuple[tuple[str, ...], tuple[int, ...], dict[str, Any]]] = [
    (("dp", "tp"), (2, 2), {"data_dims": ("dp",)}),
    (("dp_replicate", "dp_shard", "tp"), (2, 2, 1), {"data_dims": ("dp_replicate", "dp_shard")}),
    (("dp", "cp"), (2, 2), {"data_dims": "dp", "context_dim": "cp"}),
]


def _one_process(rank: int, store: str, url: str, folder: str) -> None:
    """One of four: a loader for each case's mesh; what it got goes to a file."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    found: list[Any] = []
    for names, shape, arguments in CASES:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with CorpusLoader(
            url,
            corpus="web",
            seq_len=16,
            global_batch_size=12,
            device="cpu",
            num_steps=2,
            placement=Placement(mesh=mesh, **arguments),
            network=Network(headers={"X-Case": f"{len(found)} {rank}"}),
        ) as loader:
            found.append([batch.inputs.tolist() for batch in loader])
    Path(folder, str(rank)).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def test_processes_of_a_real_mesh(server: ReferenceServer, corpus: ReferenceCorpus, tmp_path: Path) -> None:
    """Four processes; which rows and columns each must have is written out by hand."""
    # Of a process that has imported torch: each process that is spawned imports it for itself.
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "corpus_client"])
    arguments = (str(tmp_path / "store"), server.url, str(tmp_path))
    torch.multiprocessing.start_processes(_one_process, arguments, nprocs=4, start_method="forkserver")
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    (plan,) = server.plans.values()
    low, high, all_columns = slice(0, 6), slice(6, 12), slice(0, 16)
    expected: list[list[tuple[slice, slice]]] = [
        [(low, all_columns), (low, all_columns), (high, all_columns), (high, all_columns)],
        [(slice(3 * rank, 3 * rank + 3), all_columns) for rank in range(4)],
        [(low, slice(0, 8)), (low, slice(8, 16)), (high, slice(0, 8)), (high, slice(8, 16))],
    ]
    for case, step, rank in itertools.product(range(3), range(2), range(4)):
        whole = tokens_of_step(corpus, plan, step)[:, :-1]
        assert found[rank][case][step] == whole[expected[case][rank]].tolist(), (case, step, rank)
    asked: dict[str, list[str]] = {}
    for headers, path in zip(server.array_headers, server.paths, strict=True):
        asked.setdefault(headers["X-Case"], []).append(path)
    for case in (0, 2):
        urls = [set(asked[f"{case} {rank}"]) for rank in range(4)]
        assert urls[0] == urls[1]
        assert urls[2] == urls[3]
        assert not urls[0] & urls[2]
