"""What a build was told, and its division into parts.

A job is kept in the work folder `OUT.building` beside OUT, so that a build that was interrupted continues
with the same options on the same inputs, and so that many machines can work on one job:

    OUT.building/
      job.json               the options, the inputs, the parts
      parts/000012.*         what part 12 came to, its tokens and document lengths, see part.py
      whole/                 becomes OUT when it is complete
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.formats.layout import TOKEN_DTYPES, TokenDtype
from corpus_server.corpus_spec import SPLITS
from corpus_server.errors import InvalidParameter
from corpus_server.tools.building.manifest import Strict, read_json, write_json

SHARD_TOKENS: Final = 100_000_000  # tokens; as FineWeb's and modded-nanogpt's shards
TRAIN: Final = "train"
TEXT_FIELD: Final = "text"  # holds the text of a record, if nobody says otherwise
NO_MASK: Final = "none"  # stands for the fields of a mask where there is to be none
MAX_IDS: Final = 1 << 32  # token ids lie below
PARTS: Final = "parts"
WHOLE: Final = "whole"
SKIPPED: Final = "skipped.txt"
"""In OUT: a line for each document that was left out because of an error."""
_FILE: Final = "job.json"


def work_folder(out: Path) -> Path:
    """Return where the work for the corpus `out` lies; raise InvalidParameter if `out` has no name."""
    if out.name in ("", ".."):  # `.` and `/`
        raise InvalidParameter.expected("out", "a folder that does not exist yet", str(out))
    return out.with_name(f"{out.name}.building")


@dataclass(frozen=True, kw_only=True, slots=True)
class Split(Strict):
    """A share of all documents, chosen by a hash of their content. It becomes the folder OUT/name."""

    name: str
    share: float  # in (0, 1)

    def __post_init__(self) -> None:
        names = {name: split for name, split in SPLITS.items() if split != TRAIN}
        if self.name not in names:  # servers tell splits apart by these names
            raise InvalidParameter.expected("split", f"one of {', '.join(sorted(names))}", self.name)
        object.__setattr__(self, "name", names[self.name])  # the folder's name, whatever it was called
        if not 0 < self.share < 1:
            raise InvalidParameter.expected("split", "NAME=SHARE with a share between 0 and 1", self.share)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat(Strict):
    """How conversations become text, see chats.py."""

    field: str  # that holds the list of messages
    template: str  # Jinja
    tokens: dict[str, str]  # names that the template knows, such as `bos_token` and `eos_token`


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildOptions(Strict):
    """Everything that decides the bytes of the corpus, besides the inputs.

    Attributes:
        tokenizer: `bytes`, or the absolute path of a tokenizer's file; None for columns of ids without one.
        text_field: field of JSON lines, or column, that holds a document's text.
        column: field or column that holds a document's token ids; then no text is read.
        rows: what rows of token ids are: documents, or pieces of running text, see kinds/packed.py. None:
            documents, unless their first ones do not look so.
        chat: the documents are conversations; then neither text nor ids are read.
        eot: id of the end-of-text token, which ends each document.
        vocab_size: of the tokenizer; None without one.
        shard_tokens: most tokens of a shard.
        splits: parts of the corpus besides `train`, which gets the remaining documents. Empty: no division.
        mask: fields beside the token ids that say which tokens are targets of training, see kinds/masked.py;
            `none` alone for none, whatever fields there are.
        keep: fields or columns of the records that become the metadata of the documents, see kept.py.
        cut_texts: encode texts of any length, in pieces that end where lines end.
        on_error: what to do with a document that cannot be read or encoded: end the build, or leave it out.
    """

    tokenizer: str | None
    text_field: str = TEXT_FIELD
    column: str | None = None
    rows: Literal["documents", "packed"] | None = None
    chat: Chat | None = None
    eot: int
    vocab_size: int | None
    shard_tokens: int = SHARD_TOKENS
    splits: tuple[Split, ...] = ()
    keep: tuple[str, ...] = ()
    mask: tuple[str, ...] = ()
    cut_texts: bool = False
    on_error: Literal["refuse", "skip"] = "refuse"

    def __post_init__(self) -> None:
        if not 0 <= self.eot < (self.vocab_size or MAX_IDS):
            raise InvalidParameter.expected("eot", f"in [0, {(self.vocab_size or MAX_IDS) - 1}]", self.eot)
        if self.shard_tokens < 1:
            raise InvalidParameter.expected("shard_tokens", "at least 1", self.shard_tokens)
        if self.mask and self.column is None:
            raise InvalidParameter.expected("mask", "left out without --column", ",".join(self.mask))
        if NO_MASK in self.mask and len(self.mask) > 1:
            raise InvalidParameter.expected(
                "mask", f"names of fields, or {NO_MASK} alone", ",".join(self.mask)
            )
        if self.on_error not in ("refuse", "skip"):
            raise InvalidParameter.expected("on_error", "'refuse' or 'skip'", self.on_error)
        if self.rows not in (None, "documents", "packed"):
            raise InvalidParameter.expected("rows", "'documents' or 'packed'", self.rows)
        if self.rows is not None and self.column is None:
            raise InvalidParameter.expected("rows", "left out without --column", self.rows)
        if self.is_packed:
            self._check_packed()
        names = [split.name for split in self.splits]
        if len(set(names)) < len(names) or sum(split.share for split in self.splits) >= 1:
            shares = [f"{split.name}={split.share:g}" for split in self.splits]
            raise InvalidParameter.expected("split", "different names and shares below 1 in all", shares)

    def _check_packed(self) -> None:
        """Refuse options about documents, which rows of running text are not."""
        for name, value, why in (
            ("split", self.splits, "a document may lie in several rows: divide the documents before packing"),
            ("keep", self.keep, "a row is no document, and has no fields of one"),
            ("on_error", self.on_error == "skip", "a row that is left out would leave a hole in a text"),
        ):
            if value:
                raise InvalidParameter(f"{name} must be left out with --rows packed: {why}", parameter=name)

    @property
    def reads_text(self) -> bool:
        """Whether documents are texts, and neither token ids nor conversations."""
        return self.column is None and self.chat is None

    @property
    def is_packed(self) -> bool:
        """Whether rows are one running text."""
        return self.rows == "packed"

    @property
    def split_names(self) -> tuple[str, ...]:
        """The splits with `train` first. If it is the only one, its folder is OUT itself."""
        return (TRAIN, *(split.name for split in self.splits))

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer's file; None for `bytes`, or without a tokenizer."""
        return None if self.tokenizer in (None, "bytes") else Path(str(self.tokenizer))

    @property
    def has_masks(self) -> bool:
        """Whether the corpus has loss masks."""
        return self.chat is not None or self.mask not in ((), (NO_MASK,))

    @property
    def in_pieces(self) -> bool:
        """Whether a text may be encoded in pieces. Those of bytes are the same, wherever a text is cut."""
        return self.cut_texts or self.tokenizer == "bytes"

    @property
    def part_dtype(self) -> TokenDtype:
        """Type of the tokens in parts: the smallest that fits the vocabulary."""
        return smallest_dtype((self.vocab_size or MAX_IDS) - 1)


def smallest_dtype(largest_id: int) -> TokenDtype:
    """Return the smallest token dtype that holds an id."""
    return TOKEN_DTYPES[np.min_scalar_type(largest_id).name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Input(Strict):
    """A file that the corpus is made from, as it was when the job began."""

    path: str  # absolute
    name: str = field(compare=False)  # as the user gave it, or below the folder that the user gave
    num_bytes: int
    mtime_ns: int
    text_field: str | None = None  # None: that of the options

    @classmethod
    def of(cls, path: Path) -> Input:
        """Return the file as it is now; raise UnreadableCorpus if there is none."""
        try:
            status = path.stat()
        except OSError as error:
            raise unreadable(path, f"cannot be read: {error.strerror}", "check the path") from error
        return cls(
            path=str(path.absolute()), name=str(path), num_bytes=status.st_size, mtime_ns=status.st_mtime_ns
        )

    def whole(self) -> Slice:
        """Return all of it."""
        return self.slice(0, self.num_bytes, self.num_bytes)

    def slice(self, start: int, stop: int, num_bytes: int) -> Slice:
        """Return a stretch of it, which takes so many bytes of the disk."""
        return Slice(path=self.path, start=start, stop=stop, num_bytes=num_bytes, text_field=self.text_field)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice(Strict):
    """A stretch [start, stop) of one input: bytes of a file, or row groups of a Parquet file."""

    path: str
    start: int
    stop: int
    num_bytes: int
    text_field: str | None = None  # of the input


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Strict):
    """A unit of work: slices whose documents follow one another in the corpus."""

    number: int
    slices: tuple[Slice, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its slices."""
        return sum(each.num_bytes for each in self.slices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(Strict):
    """The options, the inputs (the tokenizer's file last), and the parts in the corpus's order."""

    kind: Literal["corpus-build"] = "corpus-build"
    version: Literal[1] = 1
    options: BuildOptions
    inputs: tuple[Input, ...]
    parts: tuple[Part, ...]

    def save(self, work: Path) -> None:
        """Publish the job in its work folder."""
        write_json(work / _FILE, self)

    @classmethod
    def load(cls, work: Path) -> Job | None:
        """Return the job of a work folder, None if none was saved there."""
        return read_json(cls, work / _FILE, "job", "say --fresh to build anew")

    def check_same(self, options: BuildOptions, inputs: tuple[Input, ...], work: Path) -> None:
        """Raise InvalidParameter, naming the difference, unless the job was begun with these."""
        # A document that ended a build may be left out when the build goes on.
        ours = dataclasses.asdict(dataclasses.replace(self.options, on_error=options.on_error))
        theirs = dataclasses.asdict(options)
        changed = [
            f"{name} was {ours[name]!r}, now {theirs[name]!r}" for name in ours if ours[name] != theirs[name]
        ]
        others = sorted({each.path for each in {*self.inputs} ^ {*inputs}})
        changed += [f"{path} was changed, added or removed" for path in others]
        if self.inputs != inputs:
            changed.append("the sources come in another order")
        if changed:
            raise InvalidParameter(
                f"{work} holds an unfinished build: {changed[0]}",
                remedy="build as before to continue it, or say --fresh to build anew",
            )
