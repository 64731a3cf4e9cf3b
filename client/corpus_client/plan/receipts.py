"""Receipts: the checksum of a step's whole global batch, and what is concluded from two of them."""

from __future__ import annotations

import logging
from functools import partial
from hashlib import sha256
from struct import iter_unpack, pack

from corpus_client import errors
from corpus_client.network import control
from corpus_client.network.control import BoundPlan
from corpus_client.network.replicas import Replicas

RECEIPT_SECONDS = 2.0
"""What a checkpoint may wait for its receipt; a receipt takes milliseconds."""

log = logging.getLogger("corpus_client")


def receipt_soon(connect: partial[Replicas], plan: BoundPlan, step: int) -> str | None:
    """Return the receipt, or None with a warning: a missing receipt never fails a checkpoint."""
    try:
        with connect(plan=plan) as replicas:
            question = control.receipt(plan.plan_id, step)
            return replicas.ask(question, deadline_seconds=RECEIPT_SECONDS)
    except errors.CorpusClientError as error:
        log.warning("the state of step %d has no receipt (no next_batch): %s", step, error)
        return None


def check_next(replicas: Replicas, plan: BoundPlan, step: int, expected: str) -> None:
    """Raise `StateMismatch` unless the step's batch is still the one of the state."""
    found = replicas.ask(control.receipt(plan.plan_id, step))
    if found != expected:
        raise errors.StateMismatch(
            f"next_batch: the state has {expected}, the server {found} for step {step}; plan and "
            "fingerprints are the same, so the corpus holds other tokens than when the state was made "
            "(or next_step was edited: leave next_batch out then); let the server verify the corpus"
        )


def check_history(replicas: Replicas, old: BoundPlan, new: BoundPlan, step: int) -> None:
    """Raise `HistoryChanged` unless both plans give the same batches before `step`, in samples."""
    for earlier in _samples(old, step):
        before, after = _evidence(replicas, old, earlier, new), _evidence(replicas, new, earlier, old)
        if before != after:
            raise errors.HistoryChanged(
                f"step {earlier} must stay as it was before the stage that begins at step {step}, got "
                f"{after} by plan {new.plan_id} and {before} by plan {old.plan_id}; the old plan goes on"
            )


def _evidence(replicas: Replicas, plan: BoundPlan, step: int, other: BoundPlan) -> str:
    """What is the same by two plans if their batches are: the receipt, or where the rows lie.

    A receipt is of the bytes that are sent, and a wider source of the new stage widens those of all steps.
    """
    if plan.dtype == other.dtype:
        return replicas.ask(control.receipt(plan.plan_id, step))
    shared = min(len(plan.shards), len(other.shards))
    digest = sha256(repr(plan.shards[:shared]).encode())
    places = replicas.ask(control.places(plan.plan_id, step))
    if plan.indices == "windows":  # of the other plan they may be pieces, as a view's are
        stage = [each for each in plan.stages if each.first_step is not None and each.first_step <= step][-1]
        places = _as_pieces(places, stage.seq_len + 1)
    digest.update(places)
    return f"sha256={digest.hexdigest()} of the rows' places"


def _as_pieces(windows: bytes, row_tokens: int) -> bytes:
    """Return the pieces that rows consist of which are windows: one each.

    windows: `(rows, 2) int64`, shard and start; returns `(rows, 4) int64`, see `wire.PIECE_ITEMS`.
    """
    rows = enumerate(iter_unpack("<2q", windows))
    return b"".join(pack("<4q", row, shard, start, row_tokens) for row, (shard, start) in rows)


def _samples(plan: BoundPlan, step: int) -> list[int]:
    """A handful of steps before `step`: first and last, the middle, the edges of the newest stage."""
    begun = [s.first_step for s in plan.stages if s.first_step is not None and s.first_step < step]
    edges = [begun[-1], begun[-1] - 1] if begun else []
    return sorted({each for each in (0, step // 2, step - 1, *edges) if 0 <= each < step})
