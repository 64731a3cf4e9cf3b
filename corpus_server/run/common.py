"""What the supervisor and its workers agree on: one socket pair per worker.

supervisor                                    worker
binds the sockets, starts a process     ->    opens the corpora, listens
the worker is ready                     <-    BEAT, then every second
restarts it when beats stop             <-    end of file: the process died
prints the reason once                  <-    text: why it cannot start
RETIRE, TERMINATE                       ->    completes what is in flight, exits
end of file: the supervisor died        ->    the same
"""

from __future__ import annotations

BEAT = b"\0"
BEAT_SECONDS = 1.0
RETIRE = b"r"
"""Another worker has taken over: listen no longer, and let the clients close their connections."""
TERMINATE = b"t"
"""The server ends: say so at /readyz for a while, then listen no longer."""
