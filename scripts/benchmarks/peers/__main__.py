"""`python -m scripts.benchmarks.peers KIND CORPUS ADDRESS_FILE`: serve until SIGTERM."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    kind, corpus, address_file = sys.argv[1:]
    # Only the one that is asked for: a bare socket's process holds no Arrow.
    peer = importlib.import_module(f"scripts.benchmarks.peers.{kind}")
    peer.serve(Path(corpus), Path(address_file))
