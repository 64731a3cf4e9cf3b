"""What the supervisor and its workers agree on: the settings as a file, and one socket pair per worker.

supervisor                                    worker
binds the sockets, starts a process     ->    reads its settings, opens the corpora, listens
the worker is ready                     <-    BEAT, then every second
restarts it when beats stop             <-    end of file: the process died
prints the reason once                  <-    text: why it cannot start
RETIRE, TERMINATE                       ->    completes what is in flight, exits
end of file: the supervisor died        ->    the same

The settings are in a file in memory, of which the worker inherits the descriptor: an environment variable
holds 128 KiB at most, about 700 corpora.
"""

from __future__ import annotations

import os
import pickle
from typing import BinaryIO

from corpus_server.settings import Settings

BEAT = b"\0"
BEAT_SECONDS = 1.0
RETIRE = b"r"
"""Another worker has taken over: listen no longer, and let the clients close their connections."""
TERMINATE = b"t"
"""The server ends: say so at /readyz for a while, then listen no longer."""


def settings_file(settings: Settings) -> BinaryIO:
    """Return a file in memory that holds the settings, for `read_settings` in one other process."""
    file = open(os.memfd_create("settings"), "w+b")  # noqa: PTH123, SIM115
    pickle.dump(settings, file)
    file.seek(0)
    return file


def read_settings(descriptor: int) -> Settings:
    """Return the settings of an inherited descriptor, and close it."""
    with open(descriptor, "rb") as file:
        settings: Settings = pickle.load(file)
    return settings
