"""Visit the page as a person does, in a process of its own: every line on standard input opens the next view.

The requests of each view are those that a browser made for it, in a JSON file: `[[[path, body], ...], ...]`.
`Live` is followed all the time. Reading the answers here costs the measuring process nothing.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from contextlib import closing
from pathlib import Path

from scripts.processes import connect, read

FOLLOWED = "/v1/live?follow=true"


def main() -> None:
    """Visit until standard input ends."""
    url, views = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    threading.Thread(target=_follow, args=(url,), daemon=True).start()
    for _, asked in zip(sys.stdin, itertools.cycle(views), strict=False):
        for path, body in asked:
            ask(url, path, body)


def ask(url: str, path: str, body: str | None) -> None:
    """Ask as the page does, and read the whole answer; a body makes it a POST."""
    with closing(connect(url)) as connection:
        connection.request("GET" if body is None else "POST", path, body)
        read(connection)


def _follow(url: str) -> None:
    with closing(connect(url)) as connection:
        connection.request("GET", FOLLOWED)
        response = connection.getresponse()
        while response.readline():
            pass


if __name__ == "__main__":
    main()
