"""Layout `windows`: each row is `seq_len + 1` consecutive tokens of a shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from corpus_server.errors import InvalidPlan
from corpus_server.plan.layouts.layout import Keys, Layout
from corpus_server.plan.rows import Rows, Windows


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRows(Layout):
    """Windows as rows."""

    name = "windows"
    sentence = "each row is seq_len + 1 consecutive tokens, wherever documents begin and end"

    def lay_out(self, windows: Windows, sources: tuple[str, ...], keys: Keys, tables: Sequence[Any]) -> Rows:
        """See `Layout.lay_out`."""
        for number in np.flatnonzero(windows.num_rows == 0).tolist():
            longest = windows.longest[number]
            raise InvalidPlan(
                f"corpus {sources[number]!r}: no shard holds a window of seq_len + 1 = "
                f"{windows.seq_len + 1} tokens; the longest has {longest}",
                parameter="seq_len",
                received=windows.seq_len,
                accepted=f"at most {longest - 1}" if longest > 1 else "no value fits this corpus",
            )
        return windows
