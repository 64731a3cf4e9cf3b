"""What all kinds of input share: a document, opening files, and errors that name the place."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.files import unreadable
from corpus_server.errors import UnreadableCorpus
from corpus_server.extras import optional_package
from corpus_server.tools.building.job import BuildOptions, Input, Slice
from corpus_server.tools.building.kept import Kept

COMPRESSED: Final = (".gz", ".zst", ".zstd", ".bz2", ".xz")
IS_IDS: Final = "for token ids say --column {}"
IS_SEVERAL: Final = "a document is one text: join the texts, or give each a record of its own"
COPIED: Final = "was the copy interrupted?"

# zstd's readers refuse windows of more than 2^27 bytes unless they are told to; pyarrow's cannot be told.
_LARGE_WINDOW: Final = "too much memory"


class Document(NamedTuple):
    """A document of an input.

    Attributes:
        unit: what the file counts its documents in, for errors: "row", say; "" for a whole file.
        number: of the row, sample or item, counted from 0; of a line, the byte at which it begins.
        content: text, or messages of a conversation, or token ids `(n,)` of any integer type; empty where the
            file has a null.
        mask: `(n,) uint8` beside token ids, 1 where a token is a target of training; None if all are.
        kept: values of the fields that `options.keep` names.
        is_last: more of the same document follows, unless it is set.
        digest: xxh3-64 of the whole text, where `content` is a piece and the build has splits.
        error: why the document cannot be taken; `content` is empty then.
    """

    path: str
    unit: str
    number: int
    content: Any
    kept: Kept = ()
    is_last: bool = True
    digest: int | None = None
    error: UnreadableCorpus | None = None
    mask: NDArray[np.uint8] | None = None

    def failed(self, error: UnreadableCorpus) -> Document:
        """Return this document as one that cannot be taken."""
        return self._replace(content="", is_last=True, error=error)

    def check(self) -> None:
        """Raise the document's error, if it has one."""
        if self.error is not None:
            raise self.error

    @property
    def place(self) -> str:
        """Where the document is: `PATH: row 3`, or the path alone for a whole file."""
        number = _line_number(self.path, self.number) if self.unit == "line" else self.number
        return f"{self.path}: {self.unit} {number}" if self.unit else self.path

    def unreadable(self, what: str, remedy: str | None = None) -> UnreadableCorpus:
        """Return the error for this document."""
        return unreadable(Path(self.place), what, remedy)


class Kind(NamedTuple):
    """How files of one kind are read and divided, and whether their documents have fields to keep, or masks.

    `check` reads no more than a first document takes. `divide` is told the bytes of a slice, for files that
    may be cut anywhere.
    """

    read: Callable[[Slice, BuildOptions], Iterator[Document]]
    check: Callable[[Slice, BuildOptions], object]
    divide: Callable[[Input, int], Iterable[Slice]] = lambda file, _: (file.whole(),)
    has_fields: bool = False
    has_masks: bool = False  # as those with fields have


def field_of(piece: Slice, options: BuildOptions) -> str:
    """Return the field, or column, that holds a document."""
    if options.chat is not None:
        return options.chat.field
    return options.column or piece.text_field or options.text_field


def no_field(name: str, found: Sequence[str], options: BuildOptions) -> tuple[str, str]:
    """Say that a field is missing, and what to do."""
    option = "--text-field, or for one source SOURCE?text=" if options.column is None else "--column"
    option = option if options.chat is None else "--chat"
    return f"has no field {name!r}, only {', '.join(map(repr, found))}", f"name one of them with {option}"


def opened(path: str) -> IO[bytes]:
    """Open a file that may be compressed."""
    name = path.lower()
    if name.endswith((".zst", ".zstd", ".zstd.bin")):
        # Not the package zstandard: it ends silently where a file was cut off.
        return io.BufferedReader(pyarrow(path).input_stream(path, compression="zstd"), 1 << 20)
    for suffix, module in ((".gz", gzip), (".bz2", bz2), (".xz", lzma)):
        if name.endswith(suffix):
            return io.BufferedReader(module.open(path))
    return Path(path).open("rb", buffering=1 << 20)


def pyarrow(path: str) -> Any:
    """Return the package, which the file at `path` needs."""
    optional_package("pyarrow.ipc", extra="build", purpose=path)
    return optional_package("pyarrow", extra="build", purpose=path)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Report what the disk and the libraries raise for a file that cannot be read or is damaged."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:  # pyarrow's are OSErrors
        remedy = COPIED
        if _LARGE_WINDOW in str(error):
            remedy = (
                "its window is larger than 128 MiB (zstd --long=28 or more): compress it anew, with "
                f"zstd -dc --long=31 {shlex.quote(path)} | zstd -o NEW.zst"
            )
        raise unreadable(Path(path), f"cannot be read: {error}", remedy) from error
    except ValueError as error:  # pyarrow's ArrowInvalid
        raise unreadable(Path(path), f"is damaged: {error}", COPIED) from error


def inner(record: Any, name: str) -> Any:
    """Return a field of nested records by its path, `message.content`; raise KeyError if there is none."""
    if isinstance(record, dict):
        if name in record:
            return record[name]
        first, _, rest = name.partition(".")
        if rest and first in record:
            return inner(record[first], rest)
    raise KeyError(name)


def _line_number(path: str, position: int) -> int:
    """Return the number of the line that begins at byte `position`; counted only when an error needs it."""
    number, left = 1, position
    with opened(path) as file:
        while left > 0 and (piece := file.read(min(left, 1 << 20))):
            number += piece.count(b"\n")
            left -= len(piece)
    return number
