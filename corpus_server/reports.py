"""Folders of reports that `corpus-server find --out` wrote, read a line at a time.

A report is one JSON object, laid out so that a server reads as much of it as it shows:

    {"n": 13, "corpora": [...], ..., "items":[
    {"item": 4, "share": 0.9, ...},
    {"item": 0, "share": 0.7, ...}
    ],"exclude":{...}}
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from corpus_server.errors import ReadFailed, UnknownReport
from corpus_server.user_files import folders_with, open_regular, reason_of
from corpus_server.work import Budget

FILE: Final = "report.json"

_HEAD_END: Final = b',"items":[\n'
_ITEMS_END: Final = b'],"exclude":'
_MAX_LINE_BYTES: Final = 4 << 20  # 15,000 places of one item; parsing it takes 40 ms
_BUFFER_BYTES: Final = 1 << 18


class Line(NamedTuple):
    """An item of a report.

    number: of the item among those of the report.
    content: JSON; None: the line is too long to be shown.
    """

    number: int
    content: bytes | None


class Reports:
    """The reports below a folder: the folder itself, if it holds one, and each folder in it.

    folder: None: there are none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def names(self) -> dict[str, Path]:
        """Return the files by the names of their folders, in order of the names.

        Raises:
            ReadFailed: the folder cannot be read.
        """
        try:
            found = folders_with(self._folder, lambda folder: (folder / FILE).exists())
        except OSError as error:
            raise ReadFailed(f"the folder of reports cannot be read: {reason_of(error)}") from error
        return {name: folder / FILE for name, folder in found.items()}

    def find(self, name: str) -> Path:
        """Return the file of a report.

        Raises:
            UnknownReport: there is none of this name.
        """
        path = self.names().get(name)
        if path is None:
            raise UnknownReport.of(name)
        return path


def layout(report: dict[str, Any]) -> Iterator[str]:
    """Yield the text of a report, see above."""
    head = {name: value for name, value in report.items() if name not in ("items", "exclude")}
    yield json.dumps(head)[:-1] + _HEAD_END.decode()
    last = len(report["items"]) - 1
    for number, item in enumerate(report["items"]):
        yield json.dumps(item) + (",\n" if number < last else "\n")
    yield f"{_ITEMS_END.decode()}{json.dumps(report['exclude'])}}}\n"


def read_head(path: Path, budget: Budget) -> bytes:
    """Return what a report says besides its items, as JSON.

    Raises:
        ReadFailed: it is none, or cannot be read.
    """
    try:
        with io.BufferedReader(open_regular(path), _BUFFER_BYTES) as lines:
            head = lines.readline(_MAX_LINE_BYTES)
    except OSError as error:
        raise _failed(path, reason_of(error)) from error
    budget.spend(num_bytes=len(head))
    if not head.endswith(_HEAD_END):
        raise _failed(path, "its first line is not that of a report of corpus-server find")
    return head.removesuffix(_HEAD_END) + b"}"


def is_report(path: Path) -> bool:
    """Tell whether a file is there that `find` wrote."""
    with suppress(ReadFailed):
        return bool(read_head(path, Budget()))
    return False


def read_items(path: Path, first: int, budget: Budget) -> Iterator[Line]:
    """Yield the items of a report from `first` on.

    Raises:
        ReadFailed: it ends before its items do, or cannot be read.
    """
    try:
        with io.BufferedReader(open_regular(path), _BUFFER_BYTES) as lines:
            lines.readline(_MAX_LINE_BYTES)
            number = 0
            while not (line := lines.readline(_MAX_LINE_BYTES)).startswith(_ITEMS_END):
                if not line:
                    raise _failed(path, "it ends before its items do; was it copied completely?")
                is_whole = line.endswith(b"\n")
                budget.spend(num_bytes=len(line))
                while not line.endswith(b"\n") and (line := lines.readline(_MAX_LINE_BYTES)):
                    budget.spend(num_bytes=len(line))
                if number >= first:
                    yield Line(number, line.rstrip(b",\n") if is_whole else None)
                number += 1
    except OSError as error:
        raise _failed(path, reason_of(error)) from error


def _failed(path: Path, why: str) -> ReadFailed:
    return ReadFailed(f"the report {path.parent.name!r} cannot be read: {why}")
