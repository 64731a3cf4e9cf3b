"""Folders of recorded losses: the parts in them, and which of their records count.

    rank-00003-part-000017.parquet    step int64, row int32, source text, loss float32

`row` is the rank times its rows, plus the place among them. The metadata of a part (`corpus-losses`, JSON)
say in which session it was written. A resumed run trains some steps a second time, and the first losses of
those steps belong to a model that is gone: records of a step count unless a later session of the same rank,
or of another world size, began at or before that step.

    world size  rank  session began   first step    counts
             2     0  12:00                    0    steps before 400
             2     1  12:00                    0    steps before 400
             4  0..3  13:00                  400    all
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import ReadFailed, UnknownRecording
from corpus_server.extras import optional_package
from corpus_server.user_files import folders_with, open_regular, parse_json, reason_of
from corpus_server.work import Budget

METADATA_KEY = b"corpus-losses"
FOREVER = 2**63 - 1
MAX_NAMES_BYTES = 1 << 20  # of the sources of a row group, each of which is there once
BATCH_ROWS = 1 << 16  # read at once: 10 ms, 2 MB

_NAME = re.compile(r"rank-\d+-part-\d+\.parquet")
_COLUMNS = {"step": "int64", "row": "int32", "source": "dictionary<values=string", "loss": "float"}
_WHOLE_NUMBERS = {"rank": 2**20 - 1, "world_size": 2**20, "first_step": 2**40, "began": FOREVER}
_MAX_STEP = 2**40
_MAX_SOURCES = 1024  # of a plan; sums have an array for each
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError)
"""What pyarrow raises for files that are not what they should be, and what their metadata may cause."""

Version = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A file of records.

    start, stop: its steps are in [start, stop).
    counts_until: records of this step and later ones do not count.
    first_step, began: of its session; `began` in nanoseconds since 1970.
    """

    path: Path
    plan: str
    sources: tuple[str, ...]
    rank: int
    world_size: int
    first_step: int
    began: int
    num_rows: int
    start: int
    stop: int
    counts_until: int = FOREVER


class Rows(NamedTuple):
    """Some records of a part, `(n,)` each; `source` has numbers of the recording's sources."""

    step: NDArray[np.int64]
    row: NDArray[np.int32]
    source: NDArray[np.int64]
    loss: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What a folder holds at one moment.

    parts: that have records which count.
    unreadable: names of files that have a part's name and are none, with the reason.
    """

    name: str
    parts: tuple[Part, ...]
    unreadable: dict[str, str] = field(default_factory=dict)

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of all sources, in the order of the plans."""
        return tuple(dict.fromkeys(name for part in self._by_time() for name in part.sources))

    @property
    def plans(self) -> tuple[str, ...]:
        """Ids of the plans whose rows were recorded, the first one first."""
        return tuple(dict.fromkeys(part.plan for part in self._by_time()))

    @property
    def steps(self) -> tuple[int, int]:
        """The range of steps that were recorded: `(start, stop)`."""
        stops = [min(part.stop, part.counts_until) for part in self.parts]
        return min((part.start for part in self.parts), default=0), max(stops, default=0)

    def _by_time(self) -> list[Part]:
        return sorted(self.parts, key=lambda part: (part.began, part.start))


Known = dict[Path, tuple[Version, Part | str]]
"""Of files by path: their version, and what they are, or why they are no part."""


class Recordings:
    """The recordings below a folder: the folder itself, if it holds parts, and each folder in it.

    folder: None: there are none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known: Known = {}

    def names(self) -> dict[str, Path]:
        """Return the folders by name, in order of the names."""
        try:
            return folders_with(self._folder, _holds_parts)
        except OSError as error:
            raise ReadFailed(f"the folder of recordings cannot be read: {reason_of(error)}") from error

    def open(self, name: str, budget: Budget) -> Recording:
        """Look at the parts of a recording; those that did not change are not read again.

        One whose folder cannot be read has no parts.

        Raises:
            UnknownRecording: there is none of this name.
            MissingPackage: pyarrow is not installed.
        """
        folder = self.names().get(name)
        if folder is None:
            raise UnknownRecording.of(name)
        try:
            return open_recording(folder, budget, self._known)
        except ReadFailed as error:
            return Recording(name=name, parts=(), unreadable={name: error.detail})


def open_recording(folder: Path, budget: Budget, known: Known | None = None) -> Recording:
    """Look at the parts in a folder.

    known: what was found in files before; it is brought up to date.

    Raises:
        ReadFailed: the folder cannot be read.
        MissingPackage: pyarrow is not installed.
    """
    known = {} if known is None else known
    parquet = optional_package("pyarrow.parquet", extra="recordings", purpose="a folder of recorded losses")
    parts, unreadable = list[Part](), dict[str, str]()
    for path, version in _files(folder):
        if known.get(path, ((), ""))[0] != version:
            known[path] = version, _opened(parquet, path)
            budget.spend()
        found = known[path][1]
        if isinstance(found, Part):
            parts.append(found)
        else:
            unreadable[path.name] = found
    counted = (replace(part, counts_until=until) for part, until in zip(parts, _until(parts), strict=True))
    return Recording(
        name=folder.name,
        parts=tuple(part for part in counted if part.start < part.counts_until),
        unreadable=unreadable,
    )


def read_rows(part: Part, sources: tuple[str, ...], start: int, stop: int) -> Iterator[Rows]:
    """Yield the records of a part with steps in [start, stop) that count and whose loss is a number.

    Raises:
        ReadFailed: the file is damaged, or went away.
    """
    stop = min(stop, part.counts_until)
    parquet = optional_package("pyarrow.parquet", extra="recordings", purpose="a folder of recorded losses")
    numbers = {name: number for number, name in enumerate(sources)}
    try:
        with open_regular(part.path) as file:
            whole = parquet.ParquetFile(file, read_dictionary=["source"], page_checksum_verification=True)
            for batch in whole.iter_batches(BATCH_ROWS, columns=list(_COLUMNS), use_threads=False):
                step, row, source, loss = (batch.column(name) for name in _COLUMNS)
                named = source.dictionary.to_pylist()
                if strangers := [name for name in named if name not in part.sources]:
                    raise ValueError(f"its metadata do not name the source {strangers[0]!r:.100}")
                names = np.array([numbers[name] for name in named], np.int64)
                of_rows = names[source.indices.to_numpy()]
                found = Rows(step.to_numpy(), row.to_numpy(), of_rows, loss.to_numpy())
                counts = (found.step >= start) & (found.step < stop) & ~np.isnan(found.loss)
                yield Rows(*(column[counts] for column in found))  # type: ignore[arg-type]
    except _DAMAGE as error:
        raise ReadFailed(f"{part.path.name} cannot be read: {reason_of(error)}") from error


def _holds_parts(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(_NAME.fullmatch(entry.name) for entry in entries)


def _files(folder: Path) -> Iterable[tuple[Path, Version]]:
    try:
        with os.scandir(folder) as entries:
            return sorted((Path(each.path), _version(each)) for each in entries if _NAME.fullmatch(each.name))
    except OSError as error:
        raise ReadFailed(f"the recording {folder.name!r} cannot be read: {reason_of(error)}") from error


def _version(entry: os.DirEntry[str]) -> Version:
    try:
        about = entry.stat()
    except OSError:
        return (0,)  # a link to nowhere, or the file has just gone: opening it says so
    return about.st_ino, about.st_size, about.st_mtime_ns


def _opened(parquet: Any, path: Path) -> Part | str:
    """Return what a file says of itself, or why it is no part."""
    try:
        with open_regular(path) as file:
            whole = parquet.ParquetFile(file)
            types = {each.name: str(each.type) for each in whole.schema_arrow}
            wrong = [name for name, kind in _COLUMNS.items() if not types.get(name, "").startswith(kind)]
            about, described = whole.metadata, (whole.schema_arrow.metadata or {}).get(METADATA_KEY)
        if wrong or described is None:
            return "it has other columns or no metadata; was it written by record_dir=?"
        if not about.num_rows:
            return "it has no records"
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        of = {name: [each.column(list(types).index(name)).statistics for each in groups] for name in _COLUMNS}
        if any(each.null_count for column in of.values() for each in column):
            return "it has records without a step, row, source or loss"
        at = list(types).index("source")
        named = sum(each.column(at).total_uncompressed_size for each in groups)
        if named > (most := MAX_NAMES_BYTES * len(groups) + 8 * about.num_rows):
            return f"its column source has {named:,} bytes, at most {most:,} are read for so many rows"
        start, stop = min(each.min for each in of["step"]), max(each.max for each in of["step"]) + 1
        if start < 0 or stop > _MAX_STEP + 1 or min(each.min for each in of["row"]) < 0:
            return f"its steps must be in [0, {_MAX_STEP}] and its rows not negative"
        session = parse_json(described)
        if session["version"] != 1:
            return f"its version is {session['version']!r:.100}, this server reads 1"
        if wrong := _wrong_fields(session):
            return f"its metadata have no sound {', '.join(wrong)}"
        return Part(
            path=path,
            plan=session["plan"],
            sources=tuple(session["sources"]),
            **{name: session[name] for name in _WHOLE_NUMBERS},
            num_rows=about.num_rows,
            start=start,
            stop=stop,
        )
    except _DAMAGE as error:
        return f"it cannot be read: {reason_of(error)}"


def _wrong_fields(session: dict[str, Any]) -> list[str]:
    """Return names of fields that a session cannot have: one bad file must not hide all others."""
    plan, sources = session["plan"], session["sources"]
    sound = {
        "plan": isinstance(plan, str) and re.fullmatch("[0-9a-f]{64}", plan),
        "sources": isinstance(sources, list)
        and 1 <= len(sources) <= _MAX_SOURCES
        and all(isinstance(name, str) and name.isprintable() for name in sources),
        **{
            name: type(session[name]) is int and 0 <= session[name] <= most
            for name, most in _WHOLE_NUMBERS.items()
        },
    }
    if sound["rank"] and sound["world_size"]:
        sound["rank"] = session["rank"] < session["world_size"]
    return [name for name, is_sound in sound.items() if not is_sound]


def _until(parts: list[Part]) -> list[int]:
    """Return of each part from which step on later sessions count instead."""
    order = sorted({_session(part) for part in parts}, reverse=True)
    of_rank, of_world = dict[tuple[int, int], int](), dict[int, int]()
    until = dict[tuple[int, int, int, int], int]()
    for session in order:  # the last one first
        _, world_size, rank, first_step = session
        others = (first for size, first in of_world.items() if size != world_size)
        until[session] = min(of_rank.get((world_size, rank), FOREVER), *others, FOREVER)
        of_rank[world_size, rank] = min(of_rank.get((world_size, rank), FOREVER), first_step)
        of_world[world_size] = min(of_world.get(world_size, FOREVER), first_step)
    return [until[_session(part)] for part in parts]


def _session(part: Part) -> tuple[int, int, int, int]:
    return part.began, part.world_size, part.rank, part.first_step
