"""Where documents begin and end in a batch, and which part of each a context rank has.

Nothing of the structure travels: a few torch operations find it on the batch's device, from the end-of-text
id alone. With end-of-text id 9:

    inputs        5 6 9 7 8 9 4        the end-of-text token belongs to the document that it ends
    position_ids  0 1 2 0 1 2 0
    document_ids  0 0 0 1 1 1 2
    cu_seqlens    0     3     6 7
    loss_mask     1 1 0 1 1 0 1        what follows an end of text is another document's first token

Where the server says that documents begin with end of text, as those of llm.c and modded-nanogpt do, it
belongs to the document that it begins, and every target counts: from the last token of a document it says
that the document is over, and the first token after it is predicted from it.

    inputs        5 6 9 7 8 9 4
    position_ids  0 1 0 1 2 0 1
    document_ids  0 0 1 1 1 2 2
    cu_seqlens    0   2     5   7
    loss_mask     1 1 1 1 1 1 1
"""

from __future__ import annotations

import torch

from corpus_client import errors
from corpus_client.plan.world import Context

SIGNED: dict[torch.dtype, torch.dtype] = {torch.uint16: torch.int16, torch.uint32: torch.int32}
"""torch compares few unsigned tensors; the same bits read as signed ones are equal exactly when these are."""


def ends(tokens: torch.Tensor, eot_id: int) -> torch.Tensor:
    """Return whether each token is the end-of-text token: bool. tokens: any shape, as stored or widened."""
    signed = SIGNED.get(tokens.dtype)
    if signed is None:
        return tokens == eot_id
    span = torch.iinfo(signed)
    return tokens.view(signed) == (eot_id if eot_id <= span.max else eot_id + 2 * span.min)


def starts(inputs: torch.Tensor, eot_id: int, *, eot_first: bool, fills_ends: bool) -> torch.Tensor:
    """Return where documents begin: bool like `inputs`, `(rows, seq_len)`; a row's start counts.

    Args:
        eot_first, fills_ends: see `Origin`.
    """
    ended = ends(inputs, eot_id)
    found = torch.ones(inputs.shape, dtype=torch.bool, device=inputs.device)
    before, after = ended[:, :-1], ended[:, 1:]
    twice = before.clone()  # whether the two tokens before are end of text; before a row is some
    twice[:, 1:] &= ended[:, :-2]
    if not eot_first:
        found[:, 1:] = before
        if fills_ends:  # of several, the first one ends a document, the others fill the row
            found[:, 1:] &= ~(twice & after)
    elif fills_ends:  # a single one begins a document; what follows several does not
        twice[:, :1] = False
        found[:, 1:] = torch.where(after, ~before, twice)
    else:
        found[:, 1:] = after
    return found


def within(inputs: torch.Tensor, last: torch.Tensor, eot_id: int) -> torch.Tensor:
    """Return which targets count where documents begin with end of text: all but several, which fill rows.

    Args:
        inputs: `(rows, seq_len)`.
        last: `(rows, 1)`, the last target of each row.
    """
    ended = ends(inputs, eot_id)
    # A target that was masked already says nothing.
    after = torch.cat((ended[:, 1:], ends(last, eot_id) | (last.to(torch.int64) < 0)), dim=1)
    before = torch.cat((torch.zeros_like(ended[:, :1]), ended[:, :-1]), dim=1)
    return ~(ended & (before | after))


def places(starts: torch.Tensor) -> torch.Tensor:
    """Return the place of each input in its document, `(rows, seq_len) int64`, given where these begin."""
    columns = torch.arange(starts.shape[1], device=starts.device)
    return columns - torch.where(starts, columns, 0).cummax(dim=1).values


def borders(starts: torch.Tensor) -> torch.Tensor:
    """Return the borders of documents in flattened rows or chunks, for variable-length attention."""
    if starts.numel() > torch.iinfo(torch.int32).max:
        raise errors.InvalidArgument(
            f"cu_seqlens counts at most 2**31 - 1 tokens, got rows x seq_len = {starts.numel():,}"
        )
    begins = starts.clone()
    begins[..., 0] = True  # a slice of a sequence may begin inside a document
    found = begins.flatten().nonzero().flatten().to(torch.int32)
    return torch.nn.functional.pad(found, (0, 1), value=starts.numel())


def chunks(starts: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """Return the chunk of its document of each input, `(rows, seq_len) int64`; see `Batch.chunk_ids`."""
    numbers = starts.cumsum(dim=1) - 1
    lengths = torch.zeros_like(numbers).scatter_add_(1, numbers, torch.ones_like(numbers))
    left = lengths % num_chunks
    first = (left.cumsum(dim=1) - left) % num_chunks
    lengths, left, first = (each.gather(1, numbers) for each in (lengths, left, first))
    stop, place, found = first + left, places(starts), torch.zeros_like(numbers)
    for number in range(1, num_chunks):
        more = (stop.clamp(max=number) - first).clamp(min=0)  # of the chunks before, that have one more
        more += (stop - num_chunks).clamp(min=0, max=number)
        found += place >= number * (lengths // num_chunks) + more
    return found


def chosen(chunks: torch.Tensor, context: Context) -> torch.Tensor:
    """Return which inputs of whole rows a rank has, `(rows, seq_len)`: two chunks of each document."""
    is_own = torch.minimum(chunks, context.num_chunks - 1 - chunks) == context.rank
    # Every rank has as many. To look for them by `nonzero` would wait for a GPU.
    order = (~is_own).to(torch.int8).argsort(dim=1, stable=True)
    return order[:, : is_own.shape[1] // context.size]
