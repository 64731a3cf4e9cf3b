"""What every format's file shares: token types, the layout of a shard, errors, and `Format` itself."""

from __future__ import annotations

import shlex
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.files import Closing, OpenFile
from corpus_server.corpus_spec import escaped
from corpus_server.errors import InvalidParameter, UnreadableCorpus

TokenDtype = np.dtype[Any]

# Little-endian on every machine, on disk and on the wire.
TOKEN_DTYPES: Final[dict[str, TokenDtype]] = {
    "uint8": np.dtype("<u1"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
    "int32": np.dtype("<i4"),
}
ACCEPTED_DTYPES: Final = ", ".join(TOKEN_DTYPES)
COPY_AGAIN: Final = "was the copy interrupted? Copy it again"
LFS_POINTER: Final = ("is the pointer that Git LFS keeps in place of a file", "fetch the file: git lfs pull")
_MAX_TOKENS: Final = 1 << 60


Ends = NDArray[np.integer[Any]]
"""Cumulative ends of documents, in tokens."""


class DocumentIndex(Closing):
    """Document boundaries of one shard, in an open file. Entries are read one by one.

    Attributes:
        joins_sequences: whether a document may be several sequences, each written as one.
    """

    joins_sequences = False
    file: OpenFile
    num_documents: int

    def document_range(self, number: int) -> tuple[int, int]:
        """Return the tokens `(start, stop)` of document `number` in [0, num_documents)."""
        raise NotImplementedError

    def edges(self, first: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return where documents [first, first + count) begin, and where the last one ends.

        `(k, count + 1)` of `(k,)` numbers; behind the last document of all, its end is repeated.

        Raises:
            ReadFailed: the index contradicts itself there.
        """
        raise NotImplementedError

    def holding(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the documents with tokens in ranges: numbers, `(m,)`, and how many each range has, `(k,)`.

        Args:
            starts, stops: `(k,)`, tokens of the shard, none empty.

        Raises:
            ReadFailed: the index contradicts itself there.
        """
        raise NotImplementedError

    def sequence_lengths(self) -> Ends:
        """Return the tokens of each sequence that was written as one, a document in most formats.

        `(n,) int64`. The sequences lie one after another from the shard's first token on.
        """
        raise NotImplementedError

    def find_problem(self) -> str | None:
        """Read the whole index in bounded memory; return the first contradiction, or None."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file."""
        self.file.close()


class Run(NamedTuple):
    """Tokens that lie one after another in a file: a shard of the corpus."""

    data_offset: int  # byte at which its token 0 begins
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLayout:
    """Where the tokens of one file lie: in one run, or in several with other bytes between them."""

    format: str  # its name, as descriptions show it
    reason: str  # how it was recognised: `inspect` shows it
    dtype: TokenDtype
    runs: tuple[Run, ...]  # in the order of the corpus, at least one; no window crosses from one to the next
    # If the format has them, over the tokens of all runs; whoever gets the layout closes them.
    documents: DocumentIndex | None = None
    # Document ends in a side file that must be read whole: `corpus-server index` copies them to its sidecar.
    listed_ends: Callable[[], Iterator[Ends]] | None = None
    eot_first: bool = False  # whether programs that write the format begin documents with end-of-text

    @property
    def num_tokens(self) -> int:
        """Tokens of all runs."""
        return sum(run.num_tokens for run in self.runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One file format; `registry.FORMATS` lists them all.

    Attributes:
        read: returns the layout of a file of this format, and None for any other file. Raises
            UnreadableCorpus for a file of this format that is damaged or not served. It is given the dtype
            of headerless tokens, if the user named one, and whether the file was found in a folder.
        side_files: files that accompany shards: glob pattern of the name -> what it is. In a folder they
            are left out; named directly, they are refused.
        loss_masks: those of them that are loss masks.
        mask_names: the names, one or several, that the loss mask of a token file of a name may have.
        find_data: returns the data file that a path stands for (Megatron: X or X.idx for X.bin), or None
            if the path is none of this format's.
        check_folder: given all files of a folder and whether the user named a dtype, raises if a file
            lacks its counterpart.
        list_name: name of the file that lists the files of its folder, "" if the format has none.
        listed: reads such a file: the names that each listed file may have, relative to the folder; None
            for another format's.
        is_listed: tells by its name whether a file of such a folder must be on the list.
    """

    read: Callable[[OpenFile, TokenDtype | None, bool], ShardLayout | None]
    side_files: Mapping[str, str] = field(default_factory=dict)
    loss_masks: Mapping[str, str] = field(default_factory=dict)
    mask_names: Callable[[str], Collection[str]] = lambda name: ()
    find_data: Callable[[Path], Path | None] = lambda path: None
    check_folder: Callable[[Collection[Path], bool], None] = lambda paths, dtype_given: None
    list_name: str = ""
    listed: Callable[[Path], Sequence[Collection[str]] | None] = lambda path: None
    is_listed: Callable[[str], bool] = lambda name: False


def token_dtype(value: object) -> TokenDtype:
    """Return the token dtype named by `value` (a name or a numpy dtype); refuse any other."""
    try:
        dtype = np.dtype(value)  # type: ignore[call-overload]
    except TypeError:
        dtype = None
    # Not `.get(...) != dtype`: for NumPy, None is float64.
    if value is None or dtype is None or dtype not in TOKEN_DTYPES.values():
        raise InvalidParameter.expected("dtype", f"one of {ACCEPTED_DTYPES} (little-endian)", str(value))
    return TOKEN_DTYPES[dtype.name]


def read_header(
    file: OpenFile, form: str, what: str, *, num_bytes: int = 0, remedy: str = COPY_AGAIN
) -> tuple[Any, ...]:
    """Return the fields, of a form of `struct`, that a file begins with.

    Refuses a file that ends inside them, or before `num_bytes`. `what` names the header in the error.
    """
    size = struct.calcsize(form)
    if file.size_bytes < (num_bytes := max(num_bytes, size)):
        raise file.unreadable(f"{file.size_bytes} bytes end inside {what} of {num_bytes}", remedy)
    return struct.unpack(form, file.head(size))


def whole_number(file: OpenFile, num_bytes: int, what: str, remedy: str = COPY_AGAIN) -> int:
    """Return how many entries of `num_bytes` a file consists of; refuse a broken last one."""
    count, rest = divmod(file.size_bytes, num_bytes)
    if rest:
        raise file.unreadable(f"{file.size_bytes} bytes are not a whole number of {what}", remedy)
    return count


def counted_run(file: OpenFile, dtype: TokenDtype, *, data_offset: int, num_tokens: int) -> tuple[Run]:
    """Return the run of a file whose header counts its tokens; refuse a file of another size."""
    if num_tokens >= _MAX_TOKENS:  # too many digits cannot even be shown
        raise file.unreadable("its header says an impossible number of tokens", COPY_AGAIN)
    expected_bytes = data_offset + num_tokens * dtype.itemsize
    if num_tokens < 0 or file.size_bytes != expected_bytes:
        held = (file.size_bytes - data_offset) / dtype.itemsize
        raise file.unreadable(
            f"holds {held:g} tokens, its header says {num_tokens}"
            f" ({file.size_bytes} bytes, expected {expected_bytes})",
            COPY_AGAIN,
        )
    return (Run(data_offset, num_tokens),)


def not_served(file: OpenFile, what: str, remedy: str) -> UnreadableCorpus:
    """Return the error for a file of a known kind that holds no tokens in a served form."""
    return file.unreadable(f"is {what}, which is not served", remedy)


def build_ids(path: Path, column: str = "input_ids") -> str:
    """Return the remedy for a file that holds token ids in a form that is not served."""
    source = shlex.quote(str(path))
    return (
        f"copy its token ids into shards: corpus-server build {source} --column {column} --eot ID --out DIR"
    )


def with_dtype(path: Path, dtype: str) -> str:
    """Return a file or folder as commands take it, with the dtype of its tokens."""
    return f"{shlex.quote(escaped(str(path)))},dtype={dtype}"


def build_text(path: Path, field: str = "text") -> str:
    """Return the remedy for a file that holds text."""
    option = "" if field == "text" else f" --text-field {field}"
    source = shlex.quote(str(path))
    return f"tokenize its text: corpus-server build {source}{option} --tokenizer tokenizer.json --out DIR"
