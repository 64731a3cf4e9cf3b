"""Batches behave as pairs, as lists of tensors and as what they are."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate, default_convert

from corpus_client import Batch, CorpusLoader, errors

MakeLoader = Callable[..., CorpusLoader]


@pytest.fixture
def batch(make_loader: MakeLoader) -> Batch:
    loader = make_loader(eot_id=7)
    loader.seek(3)
    return next(loader)


def test_a_batch_unpacks_into_inputs_and_targets(batch: Batch) -> None:
    x, y = batch
    assert len(batch) == 2
    assert x is batch.inputs is batch[0]
    assert y is batch.targets is batch[-1]
    assert batch.as_dict() == {"inputs": x, "targets": y}
    assert repr(batch) == "Batch(step=3, (12, 16) torch.int64, (12, 16) torch.int64)"


def test_the_state_after_a_batch_begins_behind_it(batch: Batch, make_loader: MakeLoader) -> None:
    loader = make_loader()
    loader.load_state_dict(batch.state_after())
    assert next(loader).step == 4


def test_torchs_collate_functions_take_it(batch: Batch) -> None:
    """A DataLoader without a batch size converts it and keeps what it is; with one, rows are stacked."""
    converted = default_convert(batch)
    assert isinstance(converted, Batch)
    assert converted.step == 3
    assert torch.equal(converted.position_ids, batch.position_ids)
    stacked = default_collate([batch, batch])
    assert [tuple(tensor.shape) for tensor in stacked] == [(2, 12, 16), (2, 12, 16)]
    assert torch.equal(batch.inputs, stacked[0][1])


def test_what_is_kept_of_a_batch_is_not_kept_for_its_copy(batch: Batch) -> None:
    """Collate functions copy a batch and put other tensors into the copy."""
    assert batch.loss_mask.shape == (12, 16)
    stacked = default_collate([batch, batch])
    assert stacked.loss_mask.shape == (2, 12, 16)


def recursively_applied(change: Callable[[torch.Tensor], Any], data: Any) -> Any:
    """Do as `accelerate.utils.operations.recursively_apply` does with lists."""
    if isinstance(data, tuple | list):
        return type(data)(recursively_applied(change, each) for each in data)
    return change(data)


def test_accelerate_takes_it_apart_and_puts_it_together(batch: Batch) -> None:
    halves = recursively_applied(lambda tensor: tensor[:6], batch)
    assert isinstance(halves, Batch)
    assert torch.equal(halves.targets, batch.targets[:6])
    with pytest.raises(
        errors.InvalidArgument, match=r"state_after needs a batch of a CorpusLoader.*state_at"
    ):
        halves.state_after()
    shapes = recursively_applied(lambda tensor: tuple(tensor.shape), batch)
    assert list(shapes) == [(12, 16), (12, 16)]


def test_a_batch_goes_to_other_processes_and_devices(batch: Batch) -> None:
    for copied in (pickle.loads(pickle.dumps(batch)), batch.to("cpu", dtype=torch.int32, non_blocking=True)):
        assert copied.step == 3
        assert copied.state_after() == batch.state_after()
        assert torch.equal(copied.inputs, batch.inputs)
        assert torch.equal(copied.document_ids, batch.document_ids)
    assert batch.to("cpu", dtype=torch.int32).targets.dtype == torch.int32


def test_masked_slices_keep_the_structure_of_the_whole_sequence(make_loader: MakeLoader) -> None:
    plain = next(make_loader(eot_id=7))
    eot_id = int(plain.inputs[2, 3])
    whole = next(make_loader(eot_id=eot_id, ignore_index=-1))
    parts = [
        next(make_loader(eot_id=eot_id, ignore_index=-1, context_parallel=(rank, 4))) for rank in range(4)
    ]
    for name in ("inputs", "targets", "position_ids", "document_ids", "loss_mask"):
        joined = torch.cat([getattr(part.to("cpu"), name) for part in parts], dim=1)
        assert torch.equal(joined, getattr(whole, name)), name
    assert whole.targets[2, 3] == -1


def test_a_slice_without_its_rows_does_not_guess_its_positions(make_loader: MakeLoader) -> None:
    loader = make_loader(eot_id=7, context_parallel=(1, 4))
    batch = loader.next_into(*torch.zeros((2, 12, 4), dtype=torch.int64))
    assert batch.loss_mask.shape == (12, 4)
    with pytest.raises(errors.InvalidArgument, match=r"take the batch by next\(loader\)"):
        _ = batch.position_ids
