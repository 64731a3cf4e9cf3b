"""Where documents begin and end inside the rows of a batch, from the end-of-text id alone.

Nothing of it travels: every function is a few torch operations on the device of its argument. With
end-of-text id 9:

    inputs        5 6 9 7 8 9 4        the end-of-text token belongs to the document that it ends
    starts        1 0 0 1 0 0 1        a row's first token counts as a start
    positions     0 1 2 0 1 2 0
    document_ids  0 0 0 1 1 1 2
    cu_seqlens    0     3     6 7
    loss_mask     1 1 0 1 1 0 1        what follows an end of text is another document's first token
"""

from __future__ import annotations

import torch

from corpus_client import errors

_SIGNED: dict[torch.dtype, torch.dtype] = {torch.uint16: torch.int16, torch.uint32: torch.int32}
"""torch compares few unsigned tensors; the same bits read as signed ones are equal exactly when these are."""


def ends(tokens: torch.Tensor, eot_id: int) -> torch.Tensor:
    """Whether a token is the end of a text: bool, the shape of `tokens`, which may be as stored."""
    signed = _SIGNED.get(tokens.dtype)
    if signed is None:
        return tokens == eot_id
    span = torch.iinfo(signed)
    return tokens.view(signed) == (eot_id if eot_id <= span.max else eot_id + 2 * span.min)


def document_starts(inputs: torch.Tensor, eot_id: int) -> torch.Tensor:
    """Whether a document begins here. inputs: `(rows, seq_len)`; returns `(rows, seq_len) bool`."""
    starts = torch.ones(inputs.shape, dtype=torch.bool, device=inputs.device)
    starts[:, 1:] = ends(inputs[:, :-1], eot_id)
    return starts


def positions(starts: torch.Tensor) -> torch.Tensor:
    """Place of each token in its document: `(rows, seq_len) int64`, from 0 at each start."""
    columns = torch.arange(starts.shape[1], device=starts.device)
    return columns - torch.where(starts, columns, 0).cummax(dim=1).values


def document_ids(starts: torch.Tensor) -> torch.Tensor:
    """Number of each token's document in its row: `(rows, seq_len) int32`, from 0 per row."""
    return starts.cumsum(dim=1, dtype=torch.int32) - 1


def loss_mask(inputs: torch.Tensor, eot_id: int) -> torch.Tensor:
    """False where the target belongs to the next document: `(rows, seq_len) bool`."""
    return ~ends(inputs, eot_id)


def cu_seqlens(starts: torch.Tensor) -> torch.Tensor:
    """Borders of the documents in the flattened rows, as variable-length attention wants them.

    Its length depends on the data, so a GPU is waited for.

    Returns:
        `(documents + 1,) int32`: 0, each further start, and the number of tokens; row ends are borders.
    """
    if starts.numel() > torch.iinfo(torch.int32).max:
        raise errors.InvalidArgument(
            f"cu_seqlens counts at most 2**31 - 1 tokens, got rows x seq_len = {starts.numel():,}"
        )
    begins = starts.clone()
    begins[:, 0] = True  # a slice of a sequence may begin inside a document
    borders = begins.flatten().nonzero().flatten().to(torch.int32)
    return torch.nn.functional.pad(borders, (0, 1), value=starts.numel())


def max_seqlen(borders: torch.Tensor) -> int:
    """The longest document between `cu_seqlens`; a GPU is waited for."""
    return int(borders.diff().max())
