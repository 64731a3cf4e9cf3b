"""A template of workers whose requests wait for their extents for a second only."""

from __future__ import annotations

from corpus_server.responses import service
from corpus_server.run import template

if __name__ == "__main__":
    service.WAIT_SECONDS = 1.0
    template.main()
