"""The losses of rows that a training loop hands over: means by source, and rows for the files."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from corpus_client import errors
from corpus_client.network.control import BoundPlan
from corpus_client.observe.attribution import SourceLoss
from corpus_client.recording.files import Rows, RowWriter, Session
from corpus_client.recording.readback import ReadBack
from corpus_client.staging.stager import Stager

LAST_ROWS = 1024
"""Of each source, what its mean is over: its standard error is a thirtieth of the spread of single rows."""
STEPS_KEPT = 64
"""Steps that may be yielded before the losses of the first of them come, as in a pipeline of stages."""
COLLECT_SECONDS = 1.0
"""Between looks at what has arrived: in a loop whose model fills the CPU's caches, the first call of each
function of NumPy and torch takes many times as long as the next ones."""


class _Yielded(NamedTuple):
    session: Session
    step: int
    sources: torch.Tensor


class LossRecorder:
    """Takes the losses of a loader's rows. Used by the loop's thread; `stats` by any.

    Args:
        folder: where rows are written to; None: nowhere.
        place: rank and world size.
    """

    def __init__(self, stager: Stager, folder: str | os.PathLike[str] | None, place: tuple[int, int]) -> None:
        self._rank, self._world_size = place
        self._writer = None if folder is None else RowWriter(folder, self._rank)
        self._read_back = ReadBack[_Yielded](stager)
        self._session: Session | None = None
        self._yielded: dict[int, _Yielded] = {}
        self._means = _Means()
        self._num_recorded = self._num_left_out = 0
        self._due = time.monotonic() + COLLECT_SECONDS

    def begin(self) -> None:
        """Note that the loader was sent to another step: records of the same rows may come again."""
        self._session = None
        self._yielded.clear()

    def yielded(self, plan: BoundPlan, step: int, sources: torch.Tensor) -> None:
        """Keep the sources of a batch until its losses come."""
        session = self._session
        if session is None:
            place = {"rank": self._rank, "world_size": self._world_size}
            session = Session(plan.plan_id, plan.sources, **place, first_step=step, began=time.time_ns())
        elif session.plan != plan.plan_id:
            session = replace(session, plan=plan.plan_id, sources=plan.sources)
        self._session = session
        self._yielded[step] = _Yielded(session, step, sources)
        if len(self._yielded) > STEPS_KEPT:
            del self._yielded[next(iter(self._yielded))]

    def record(self, step: int, losses: Any) -> None:
        """Take the losses of a step's rows; waits for nothing.

        Raises:
            InvalidArgument: the step was not yielded lately, or the losses are not one number for each row.
        """
        if not isinstance(losses, torch.Tensor):
            losses = _tensor_of(losses)
        is_number = hasattr(step, "__index__")
        yielded = self._yielded.get(step) if is_number else None
        if yielded is None:
            kept = f"{min(self._yielded)} to {max(self._yielded)}" if self._yielded else "none"
            raise errors.InvalidArgument(
                f"step must be one of the last {STEPS_KEPT} that the loader yielded and that are not "
                f"recorded yet ({kept}), got {step if is_number else type(step).__name__}; pass batch.step, "
                "once a step"
            )
        rows, shape = yielded.sources.shape[0], losses.shape
        if shape != (rows,) or not losses.is_floating_point():
            raise errors.InvalidArgument(
                f"losses must be one floating-point number for each of the {rows} rows of step {step}, "
                f"got {losses.dtype} of shape {tuple(shape)}; torch.cat joins those of micro batches"
            )
        if not self._read_back.push(yielded, losses, yielded.sources, rows):
            self._collect()
            if not self._read_back.push(yielded, losses, yielded.sources, rows):
                self._num_left_out += rows
        del self._yielded[step]
        self._num_recorded += rows
        if time.monotonic() >= self._due:
            self._collect()

    def measure(self) -> None:
        """Take what has arrived from the device."""
        if not self._read_back.is_capturing():
            self._collect()

    def stats(self) -> dict[str, Any]:
        """Return the fields of `LoaderStats` that are about losses, as far as they have been taken."""
        written, lost = (self._writer.num_written, self._writer.num_lost) if self._writer else (0, 0)
        return {
            "losses": self._means.by_source(),
            "num_recorded_rows": self._num_recorded,
            "num_written_rows": written,
            "num_lost_rows": self._num_left_out + lost,
        }

    def close(self) -> None:
        """Wait for what is on its way, and have it written."""
        # After a device error nothing more arrives; the loop meets the error where it waits for the device.
        with contextlib.suppress(RuntimeError):
            self._collect(wait=True)
        if self._writer is not None:
            self._writer.close()

    def _collect(self, *, wait: bool = False) -> None:
        self._due = time.monotonic() + COLLECT_SECONDS
        arrived = self._read_back.arrived(wait=wait)
        for session, group in groupby(arrived, key=lambda each: each[0].session):
            yielded, losses, sources = zip(*group, strict=True)
            rows = Rows(
                session,
                [each.step for each in yielded],
                [len(each) for each in losses],
                torch.cat(losses).numpy(),
                torch.cat(sources).cpu().numpy().astype(np.uint16),
            )
            self._means.add(rows)
            if self._writer is not None:
                self._writer.put(rows)


class _Means:
    """The last losses of each source; asked from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, npt.NDArray[np.float32]] = {}
        self._counts: dict[str, int] = {}

    def add(self, rows: Rows) -> None:
        losses, sources = rows.losses, rows.sources
        known = np.isfinite(losses)
        losses, sources = losses[known], sources[known]
        order = np.argsort(sources, kind="stable")
        numbers, starts = np.unique(sources[order], return_index=True)
        with self._lock:
            for number, new in zip(numbers.tolist(), np.split(losses[order], starts[1:]), strict=True):
                name = rows.session.sources[number]
                last = np.concatenate((self._last.get(name, new[:0]), new[-LAST_ROWS:]))
                self._last[name] = last[-LAST_ROWS:].copy()
                self._counts[name] = self._counts.get(name, 0) + len(new)

    def by_source(self) -> dict[str, SourceLoss]:
        with self._lock:
            return {
                name: SourceLoss(mean=float(last.mean(dtype=np.float64)), count=self._counts[name])
                for name, last in self._last.items()
            }


def _tensor_of(losses: Any) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(losses, np.float32))
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgument(f"losses must be numbers, got {losses!r:.200}: {error}") from error
