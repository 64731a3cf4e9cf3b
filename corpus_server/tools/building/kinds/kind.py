"""What all kinds of input share: a document, opening files, and errors that name the place."""

from __future__ import annotations

import bz2
import codecs
import errno
import gzip
import io
import lzma
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from numpy.typing import NDArray

from corpus_server.corpus.files import unreadable
from corpus_server.errors import UnreadableCorpus
from corpus_server.extras import optional_package
from corpus_server.tools.building.job import BuildOptions, Input, Slice
from corpus_server.tools.building.kept import Kept

_BLOCK_BYTES: Final = 1 << 18  # read of a compressed file at once
COMPRESSED: Final = (".gz", ".zst", ".zstd", ".bz2", ".xz")
IS_IDS: Final = "for token ids say --column {}"
IS_SEVERAL: Final = "a document is one text: join the texts, or give each a record of its own"
IS_CHAT: Final = "for conversations say --chat {}"
COPIED: Final = "was the copy interrupted?"

# zstd's readers refuse windows of more than 2^27 bytes unless they are told to; pyarrow's cannot be told.
_LARGE_WINDOW: Final = "too much memory"
_DICTIONARY: Final = "Dictionary mismatch"

HEAD_BYTES: Final = 64
# How files begin, and how their names end. A text may begin like some, but goes on with printable characters.
_MAGIC: Final = {
    "gzip": (b"\x1f\x8b", (".gz",)),
    "Zstandard": (b"\x28\xb5\x2f\xfd", (".zst", ".zstd", ".zstd.bin")),
    "xz": (b"\xfd7zXZ\0", (".xz",)),
    "bzip2": (b"BZh", (".bz2",)),
    "zip": (b"PK\x03\x04", ()),
    "Parquet": (b"PAR1", (".parquet",)),
    "Arrow": (b"ARROW1", (".arrow", ".feather")),
}
_PAGES: Final = (b"<!doctype html", b"<html")
_TEXTS: Final = (".txt", ".text", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_BY_ERRNO: Final = {
    errno.EACCES: "check its permissions",
    errno.ENOENT: "was it moved or removed? Build again",
}


class Document(NamedTuple):
    """A document of an input.

    Attributes:
        unit: what the file counts its documents in, for errors: "row", say; "" for a whole file.
        number: of the row, sample or item, counted from 0; of a line, the byte at which it begins.
        content: text, or messages of a conversation, or token ids `(n,)` of any integer type; empty where the
            file has a null.
        tools: of a conversation, what a field of this name beside it says: those that the assistant may call.
        mask: `(n,)` beside token ids, by what the loss of each token is multiplied; None if by 1.
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
    mask: NDArray[Any] | None = None
    tools: Any = None

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


TOOLS: Final = "tools"
"""The field of the tools of a conversation, as TRL reads it."""


def field_of(piece: Slice, options: BuildOptions) -> str:
    """Return the field, or column, that holds a document."""
    if options.chat is not None:
        return options.chat.field
    return options.column or piece.text_field or options.text_field


def no_field(name: str, found: Sequence[str], options: BuildOptions) -> tuple[str, str]:
    """Say that a field is missing, and what to do."""
    of_text = "--text-field (find: --field), or for one source SOURCE?text="
    option = of_text if options.column is None else "--column"
    option = option if options.chat is None else "--chat"
    return f"has no field {name!r}, only {', '.join(map(repr, found))}", f"name one of them with {option}"


def opened(path: str) -> IO[bytes]:
    """Open a file that may be compressed."""
    name = path.lower()
    if name.endswith((".zst", ".zstd", ".zstd.bin")):
        # Not the package zstandard: it ends silently where a file was cut off.
        return io.BufferedReader(pyarrow(path).input_stream(path, compression="zstd"), 1 << 20)
    if name.endswith(".gz"):
        return io.BufferedReader(gzip.open(path))
    for suffix, decompressor in ((".bz2", bz2.BZ2Decompressor), (".xz", lzma.LZMADecompressor)):
        if name.endswith(suffix):
            return io.BufferedReader(_Streams(path, decompressor), 1 << 18)
    return Path(path).open("rb", buffering=1 << 20)


class _Streams(io.RawIOBase):
    """The streams of a file, decompressed one after another.

    The files of `bz2` and `lzma` end silently where a stream behind the first one is damaged, or padded.
    """

    def __init__(
        self, path: str, decompressor: type[bz2.BZ2Decompressor] | type[lzma.LZMADecompressor]
    ) -> None:
        self._file, self._new = Path(path).open("rb"), decompressor  # noqa: SIM115 - `close` closes it
        self._stream = decompressor()
        self._num_streams = 1

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            if self._stream.eof:
                if not (compressed := self._behind()):
                    return 0
                self._stream, self._num_streams = self._new(), self._num_streams + 1
            else:
                compressed = self._file.read(_BLOCK_BYTES) if self._stream.needs_input else b""
                if self._stream.needs_input and not compressed:
                    raise EOFError("the file ends inside a compressed stream")
            try:
                data = self._stream.decompress(compressed, len(buffer))
            except (OSError, lzma.LZMAError) as error:
                raise OSError(f"{error} (stream {self._num_streams} of the file)") from error
        buffer[: len(data)] = data
        return len(data)

    def _behind(self) -> bytes:
        """Return the first bytes of the next stream, none behind the last one."""
        found, padding = self._stream.unused_data or self._file.read(_BLOCK_BYTES), 0
        while self._new is lzma.LZMADecompressor and found.startswith(b"\0"):  # of multiples of 4 bytes
            padding += len(found) - len(found := found.lstrip(b"\0"))
            found = found or self._file.read(_BLOCK_BYTES)
        if padding % 4:
            raise OSError(f"{padding} bytes of zeros follow stream {self._num_streams}, which no xz file has")
        return found


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
        if isinstance(error, OSError) and error.errno in _BY_ERRNO:
            raise unreadable(
                Path(path), f"cannot be read: {error.strerror}", _BY_ERRNO[error.errno]
            ) from error
        if isinstance(error, gzip.BadGzipFile):
            remedy = "is it what its name says? Or was the copy interrupted?"
        if _DICTIONARY in str(error):
            remedy = (
                "it was compressed with a dictionary: compress it anew without, with "
                f"zstd -dc -D DICTIONARY {shlex.quote(path)} | zstd -o NEW.zst"
            )
        if _LARGE_WINDOW in str(error):
            remedy = (
                "its window is larger than 128 MiB (zstd --long=28 or more): compress it anew, with "
                f"zstd -dc --long=31 {shlex.quote(path)} | zstd -o NEW.zst"
            )
        raise unreadable(Path(path), f"cannot be read: {error}", remedy) from error
    except UnicodeDecodeError as error:
        with opened(path) as file:
            what, remedy = no_utf8(file.read(HEAD_BYTES))
        raise unreadable(Path(path), what, remedy) from error
    except ValueError as error:  # pyarrow's ArrowInvalid
        raise unreadable(Path(path), f"is damaged: {error}", COPIED) from error


def misnamed(name: str, head: bytes) -> tuple[str, str] | None:
    """Return what is wrong with a file that is of another kind than its name says, and what to do.

    head: its first `HEAD_BYTES`; an empty file is of any kind.
    """
    name = name.lower()
    said = next((kind for kind, (_, ends) in _MAGIC.items() if name.endswith(ends)), None)
    found = next((kind for kind, (magic, _) in _MAGIC.items() if head.startswith(magic)), None)
    if head.lstrip().lower().startswith(_PAGES) and not name.endswith((".txt", ".text")):
        if name.endswith(_TEXTS) or said is not None:
            return "is a page of HTML", "was a download refused? Look into it, and download it again"
        return None
    if (
        found not in (None, said)
        and (min(head) < 9 or max(head) > 127)
        and (said is not None or name.endswith(_TEXTS))
    ):
        end = next(iter(_MAGIC[str(found)][1]), "")
        remedy = f"rename it so that it ends with {end}" if end else "unpack it, and name what it holds"
        return f"is {found}, which its name does not say", remedy
    return None


def no_utf8(head: bytes) -> tuple[str, str]:
    """Return what a text is that is no UTF-8, by its first bytes, and what to do."""
    encoding = encoding_of(head)
    what = "is not UTF-8" if encoding is None else f"is {encoding}"
    return what, f"convert it with iconv -f {encoding or 'ITS-ENCODING'} -t UTF-8"


def encoding_of(head: bytes) -> str | None:
    """Return UTF-16 or UTF-32 by the byte order mark, or by the NULs beside characters of ASCII."""
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32"
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    columns = [head[at::4] for at in range(4)]
    if len(head) > 6 and sum(map(any, columns)) == 1:
        return "UTF-32LE" if any(columns[0]) else "UTF-32BE"
    low, high = head[0::2], head[1::2]
    if len(head) > 2 and not any(high) and all(low):
        return "UTF-16LE"
    return "UTF-16BE" if len(head) > 2 and not any(low) and all(high) else None


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
