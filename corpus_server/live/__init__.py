"""The last hour, sampled from what all workers count.

Every 5 s one worker, whichever comes first, adds up the numbers of all and writes a sample. All of them
answer from its file, so it does not matter which one is asked, and asking costs next to nothing.

    state_dir/metrics/SUPERVISOR/live    {"at": ..., "numbers": {...}, "averages": {...}, "response": {...}}

A metric says itself where it is shown (`Curve`, `CorpusColumn`); what is made of several is in `shown.py`.
"""

from corpus_server.live.hour import AVERAGE_SECONDS, TOOLS, State, after, next_state, publish, response
from corpus_server.live.shown import COLUMNS, Live, quantile

__all__ = [
    "AVERAGE_SECONDS",
    "COLUMNS",
    "TOOLS",
    "Live",
    "State",
    "after",
    "next_state",
    "publish",
    "quantile",
    "response",
]
