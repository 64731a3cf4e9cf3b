"""Document structure: exactly what a plain loop over the tokens finds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from corpus_client import Batch, errors
from corpus_client.batch import Origin
from corpus_client.plan.world import WHOLE, Context
from corpus_client.staging.stager import STORED_DTYPES, Views, joined, shifted
from corpus_client.structure import borders

DTYPES = list(STORED_DTYPES.values())


def by_hand(
    rows: list[list[int]],
    eot_id: int,
    context: Context = WHOLE,
    *,
    fills_ends: bool = False,
    eot_first: bool = False,
) -> dict[str, Any]:
    """The structure of whole windows, one token after another.

    fills_ends: of several ends of text in a row, the first one ends a document, and the others are one more;
        if documents begin with them, all of them are one.
    """
    rank, size, zigzag, _ = context
    chunks = [rank, 2 * size - 1 - rank] if zigzag else [rank]
    width = (len(rows[0]) - 1) // (2 * size if zigzag else size)
    mine = [chunk * width + column for chunk in chunks for column in range(width)]
    found: dict[str, Any] = {
        name: [] for name in ("inputs", "targets", "position_ids", "document_ids", "loss_mask")
    }
    borders, num_tokens = [0], 0
    for row in rows:
        lines: dict[str, list[Any]] = {name: [] for name in found}
        position = document = 0
        ends = [(is_end, [*its]) for is_end, its in itertools.groupby(row, lambda each: each == eot_id)]
        of_run = [(is_end, len(its), at) for is_end, its in ends for at in range(len(its))]
        for column, token in enumerate(row[:-1]):
            is_end, length, at = of_run[column]
            before = of_run[column - 1] if column else None
            if before is None:
                begins = False
            elif not eot_first and not fills_ends:
                begins = before[0]
            elif (
                not eot_first
            ):  # what follows a run, or its first end of text, unless the row begins with that
                begins = before[0] and (not is_end or (at == 1 and column > 1))
            elif not fills_ends:
                begins = is_end
            else:
                begins = at == 0 and (is_end or (before[0] and before[1] > 1))
            if begins:
                position, document = 0, document + 1
            if column in mine:
                if num_tokens > borders[-1] and (position == 0 or column % width == 0):
                    borders.append(num_tokens)
                num_tokens += 1
                lines["inputs"].append(token)
                lines["targets"].append(row[column + 1])
                lines["position_ids"].append(position)
                lines["document_ids"].append(document)
                is_filler = is_end and length > 1 and fills_ends
                lines["loss_mask"].append(not is_filler if eot_first else not is_end)
            position += 1
        for name, line in lines.items():
            found[name].append(line)
    borders.append(num_tokens)
    found["cu_seqlens"] = borders
    found["max_seqlen"] = max(stop - start for start, stop in itertools.pairwise(borders))
    return found


def structure_of(batch: Batch) -> dict[str, Any]:
    """Everything that a batch says, as lists."""
    names = ("inputs", "targets", "position_ids", "document_ids", "loss_mask", "cu_seqlens")
    found: dict[str, Any] = {name: getattr(batch, name).cpu().numpy().tolist() for name in names}
    return {**found, "max_seqlen": batch.max_seqlen}


def make_batch(
    stored: torch.Tensor,
    eot_id: int | None,
    context: Context = WHOLE,
    *,
    fills_ends: bool = False,
    eot_first: bool | None = False,
) -> Batch:
    (only,) = shifted(stored[None], context)
    origin = Origin(eot_id=eot_id, context=context, fills_ends=fills_ends, eot_first=eot_first)
    inputs, targets = map(joined, only.pair)
    return Batch(Views(inputs, targets, only.rows), 3, origin)


def check(tokens: np.ndarray, eot_id: int, context: Context, dtype: torch.dtype, device: str) -> None:
    stored = torch.from_numpy(tokens).to(dtype).to(device)
    for eot_first, fills_ends in ((True, True), (True, False), (False, True)):
        batch = make_batch(stored, eot_id, context, fills_ends=fills_ends, eot_first=eot_first)
        expected = by_hand(tokens.tolist(), eot_id, context, fills_ends=fills_ends, eot_first=eot_first)
        assert structure_of(batch) == expected
    batch = make_batch(stored, eot_id, context)
    assert structure_of(batch) == by_hand(tokens.tolist(), eot_id, context)
    assert batch.position_ids.dtype == torch.int64
    assert batch.document_ids.dtype == batch.cu_seqlens.dtype == torch.int32
    assert batch.loss_mask.dtype == torch.bool
    for name in ("position_ids", "document_ids", "cu_seqlens", "loss_mask"):
        assert getattr(batch, name).device == stored.device
        assert getattr(batch, name) is getattr(batch, name)


@st.composite
def windows(draw: st.DrawFn) -> tuple[np.ndarray, int, Context, torch.dtype]:
    """Rows in which ends of text are common, also as neighbours and at the edges."""
    dtype = draw(st.sampled_from(DTYPES))
    high = torch.iinfo(dtype).max if dtype != torch.int64 else 2**32 - 1
    eot_id = draw(st.sampled_from([0, 1, high // 2, high // 2 + 1, high - 1, high]))
    size = draw(st.sampled_from([1, 1, 2, 3]))
    context = Context(draw(st.integers(0, size - 1)), size, size > 1 and draw(st.booleans()))
    rows, seq_len = draw(st.integers(1, 4)), context.num_chunks * draw(st.integers(1, 9))
    others = [token for token in (0, 2, high // 2, high) if token != eot_id]
    cells = st.sampled_from([eot_id, *others])
    row = st.lists(cells, min_size=seq_len + 1, max_size=seq_len + 1)
    tokens = np.array(draw(st.lists(row, min_size=rows, max_size=rows)), np.int64)
    return tokens, eot_id, context, dtype


@given(windows())
@example((np.array([[5, 6, 9, 7, 8, 9, 4, 1]]), 9, WHOLE, torch.int64))
@example((np.full((2, 4), 9), 9, Context(0, 3), torch.uint16))
@example((np.array([[9, 1]]), 9, WHOLE, torch.uint8))
def test_structure_is_what_a_plain_loop_finds(case: tuple[np.ndarray, int, Context, torch.dtype]) -> None:
    check(*case, "cpu")


def test_the_unused_end_of_a_row_of_documents_is_one_document() -> None:
    batch = make_batch(torch.tensor([[5, 6, 9, 9, 9, 9], [9] * 6, [4, 9, 8, 7, 9, 9]]), 9, fills_ends=True)
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 10, 12, 15]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]
    assert batch.loss_mask.tolist() == [
        [True, True, *[False] * 3],
        [False] * 5,
        [True, False, True, True, False],
    ]


def test_the_example_of_the_documentation() -> None:
    batch = make_batch(torch.tensor([[5, 6, 9, 7, 8, 9, 4, 1]]), 9)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1, 1, 2]]
    assert batch.cu_seqlens.tolist() == [0, 3, 6, 7]
    assert batch.max_seqlen == 3
    assert batch.loss_mask.tolist() == [[True, True, False, True, True, False, True]]


def test_documents_that_begin_with_end_of_text() -> None:
    """The example of the documentation, and rows in which they are packed."""
    batch = make_batch(torch.tensor([[5, 6, 9, 7, 8, 9, 4, 1]]), 9, eot_first=True)
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 1]]
    assert batch.document_ids.tolist() == [[0, 0, 1, 1, 1, 2, 2]]
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 7]
    assert batch.loss_mask.tolist() == [[True] * 7]
    # A document, one that began in another row, and the unused end.
    packed = make_batch(torch.tensor([[9, 5, 6, 9, 9, 7, 8, 9, 9, 9]]), 9, fills_ends=True, eot_first=True)
    assert packed.document_ids.tolist() == [[0, 0, 0, 1, 1, 2, 2, 3, 3]]
    assert packed.loss_mask.tolist() == [[True, True, True, False, False, True, True, False, False]]


def test_of_both_kinds_of_documents_no_structure_is_guessed() -> None:
    batch = make_batch(torch.zeros((2, 5), dtype=torch.int64), 0, eot_first=None)
    for name in ("position_ids", "loss_mask"):
        with pytest.raises(errors.InvalidArgument, match="some corpora of the plan begin with end of text"):
            getattr(batch, name)


def test_the_slices_of_all_context_ranks_are_the_sequence() -> None:
    tokens = torch.randint(0, 4, (3, 13))
    whole = make_batch(tokens, 0)
    parts = [make_batch(tokens, 0, Context(rank, 4)) for rank in range(4)]
    for name in ("inputs", "targets", "position_ids", "document_ids", "loss_mask"):
        joined = torch.cat([getattr(part, name) for part in parts], dim=1)
        assert torch.equal(joined, getattr(whole, name)), name


def test_two_ranks_in_zigzag_order_have_the_outer_and_the_inner_chunks() -> None:
    """The example of `Context`, as ring attention wants it."""
    tokens = torch.arange(17).view(1, 17)
    outer, inner = (make_batch(tokens, 99, Context(rank, 2, zigzag=True)) for rank in range(2))
    assert outer.inputs.tolist() == [[0, 1, 2, 3, 12, 13, 14, 15]]
    assert outer.targets.tolist() == [[1, 2, 3, 4, 13, 14, 15, 16]]
    assert outer.position_ids.tolist() == [[0, 1, 2, 3, 12, 13, 14, 15]]
    assert outer.cu_seqlens.tolist() == [0, 4, 8]
    assert inner.position_ids.tolist() == [[4, 5, 6, 7, 8, 9, 10, 11]]


@given(
    st.integers(1, 4).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.integers(1, 8).flatmap(
                lambda width: st.lists(
                    st.lists(st.booleans(), min_size=2 * size * width, max_size=2 * size * width),
                    min_size=1,
                    max_size=3,
                )
            ),
        )
    )
)
def test_each_rank_has_head_and_tail_of_each_document(case: tuple[int, list[list[bool]]]) -> None:
    """Every input is at one rank; of a document no rank has above two more than another, in two runs."""
    size, ends = case
    if size == 1:
        return
    tokens = torch.tensor([[9 if end else 5 for end in [*row, False]] for row in ends])
    whole = make_batch(tokens, 9)
    parts = [
        make_batch(tokens, 9, Context(rank, size, by_document=True)).of_documents() for rank in range(size)
    ]
    seen = torch.cat([part._chosen for part in parts], dim=1)
    assert seen.sort(dim=1).values.tolist() == [list(range(tokens.shape[1] - 1))] * len(tokens)
    for rank, part in enumerate(parts):
        for name in ("inputs", "targets", "position_ids", "document_ids", "loss_mask"):
            expected = getattr(whole, name).gather(1, part._chosen)
            assert torch.equal(getattr(part, name), expected), name
        for row in range(len(tokens)):
            at, documents = part._chosen[row].tolist(), part.document_ids[row].tolist()
            chunks = part.chunk_ids[row].tolist()
            assert set(chunks) <= {rank, 2 * size - 1 - rank}
            for (one, its, chunk), (other, of, next_) in itertools.pairwise(
                zip(at, documents, chunks, strict=True)
            ):
                assert other == one + 1 or its != of or chunk != next_
        borders_of = part.cu_seqlens.tolist()
        assert borders_of == sorted(set(borders_of))
        assert borders_of[-1] == part.inputs.numel()
    for row in range(len(tokens)):
        for document in range(int(whole.document_ids[row].max()) + 1):
            counts = [int((part.document_ids[row] == document).sum()) for part in parts]
            assert max(counts) - min(counts) <= 2


def test_the_example_of_documents_in_context_order() -> None:
    tokens = torch.tensor([[1, 2, 3, 9, *range(10, 21), 9, 30]])
    one, other = (
        make_batch(tokens, 9, Context(rank, 2, by_document=True)).of_documents() for rank in range(2)
    )
    assert one.inputs.tolist() == [[1, 9, 10, 11, 12, 19, 20, 9]]
    assert other.position_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert one.cu_seqlens.tolist() == [0, 1, 2, 5, 8]


@pytest.mark.parametrize("name", ["position_ids", "document_ids", "cu_seqlens", "max_seqlen", "loss_mask"])
def test_without_the_end_of_text_id_nothing_is_guessed(name: str) -> None:
    batch = make_batch(torch.zeros((2, 5), dtype=torch.int64), None)
    with pytest.raises(errors.InvalidArgument, match="pass eot_id= to CorpusLoader"):
        getattr(batch, name)
    assert batch.inputs.shape == (2, 4)


def test_more_tokens_than_int32_counts_are_refused() -> None:
    starts = torch.zeros(1, dtype=torch.bool).expand(2**16, 2**15)  # no memory
    with pytest.raises(errors.InvalidArgument, match="got rows x seq_len = 2,147,483,648"):
        borders(starts)
