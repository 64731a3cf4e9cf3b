"""Tokenize one part of the input: a pure function that any process on any machine may run.

A part leaves these files, each published when it is complete. The last one shows that the part is whole:

    000012.SPLIT.tokens    documents one after another, an end-of-text token behind each; `options.part_dtype`
    000012.SPLIT.lengths   tokens of each document, with its end-of-text token; <u8
    000012.SPLIT.mask      if there are loss masks: a number for each token; <f2
    000012.SPLIT.kept      fields of each document, if some are kept, see kept.py
    000012.json            counts
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import orjson
import xxhash

from corpus_server.corpus.formats.masks import WEIGHT_DTYPE
from corpus_server.corpus.metadata.pieces import append
from corpus_server.corpus.metadata.write import record_batch
from corpus_server.corpus.publish import publishing
from corpus_server.corpus.tokenizers import Tokenizer, open_tokenizer
from corpus_server.errors import UnreadableCorpus
from corpus_server.tools.building.chats import render
from corpus_server.tools.building.job import MAX_IDS, SKIPPED, BuildOptions, Part
from corpus_server.tools.building.kept import Kept
from corpus_server.tools.building.kinds import Document
from corpus_server.tools.building.kinds.text import TEXT_CHARS
from corpus_server.tools.building.manifest import Strict, read_json, write_json
from corpus_server.tools.building.sources import read_documents

_NO_TEXT: Final = "empty or null"
_ERROR: Final = f"an error; {SKIPPED} lists them"
_NO_TOKEN: Final = "the tokenizer makes no token of it"

LENGTH_DTYPE: Final[np.dtype[np.uint64]] = np.dtype("<u8")

# characters or ids encoded in one call: enough to make the call's cost small, little enough to take less than
# a second, for those who watch
_BATCH_SIZE: Final = 1 << 18

Tokens = np.ndarray[tuple[int], np.dtype[Any]]
_NOTHING: Final[Tokens] = np.empty(0, np.uint32)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartSplit(Strict):
    """What one split got of a part."""

    num_documents: int
    num_tokens: int
    largest_id: int
    num_targets: int  # tokens that are targets of training; all, without loss masks
    num_weighted: int  # tokens whose loss mask is neither 0 nor 1
    num_rounded: int  # ... and is not quite what the input says


@dataclass(frozen=True, kw_only=True, slots=True)
class PartResult(Strict):
    """What a part came to."""

    number: int
    num_bytes: int  # of input
    splits: dict[str, PartSplit]
    left_out: dict[str, int]  # documents by the reason why they are in no split
    skipped: tuple[str, ...]  # a line for each of them that has an error
    num_dropped: int  # characters, without white space, for which the tokenizer has no token
    dropped_in: str | None  # the first document with such a character, and the character

    @property
    def num_tokens(self) -> int:
        """Tokens of all splits."""
        return sum(split.num_tokens for split in self.splits.values())


def part_path(folder: Path, number: int, name: str) -> Path:
    """Return where a file of a part lies; `name` is `SPLIT.tokens`, `.lengths` or `.kept`, or `json`."""
    return folder / f"{number:06}.{name}"


def build_part(
    options: BuildOptions, part: Part, folder: Path, note: Callable[[int], None] | None = None
) -> PartResult:
    """Write the tokens and document lengths of `part` into `folder`; return what they came to.

    The bytes depend on the options and the input alone. A part that is whole already is left as it is.

    Args:
        note: is told how many characters or ids were encoded, about once a second.
    """
    if (done := find_result(part, folder)) is not None:
        return done
    choose = _chooser(options)
    skipped: list[str] = []
    dropped: list[tuple[Document, str]] = []
    is_skipping = False  # pieces of a document that cannot be taken
    with ExitStack() as files:
        left_out: Counter[str] = Counter()
        writers = [_Writer(options, part.number, folder, name, files) for name in options.split_names]
        for batch in _batches(read_documents(part, options)):
            if options.chat is not None:
                batch = [_render_chat(document, options) for document in batch]
            for document, ids in zip(batch, _encode(batch, options), strict=True):
                if isinstance(ids, UnreadableCorpus) and not is_skipping:
                    if options.on_error == "refuse":
                        raise ids
                    skipped.append(" ".join(ids.detail.split()))
                    left_out[_ERROR] += 1
                    for writer in writers:
                        writer.forget()
                    is_skipping = True
                if is_skipping or isinstance(ids, UnreadableCorpus):
                    is_skipping = not document.is_last
                    continue
                if found := _dropped(document, options):
                    dropped.append((document, found))
                writer = writers[choose(document)]
                if not writer.add(ids, document):
                    left_out[_NO_TEXT if len(document.content) == 0 else _NO_TOKEN] += 1
            for writer in writers:
                writer.flush()
            if note is not None:
                note(sum(map(_size, batch)))
    splits = {writer.name: writer.result() for writer in writers}
    result = PartResult(
        number=part.number,
        num_bytes=part.num_bytes,
        splits=splits,
        left_out=dict(left_out),
        skipped=tuple(skipped),
        num_dropped=sum(len(found) for _, found in dropped),
        dropped_in=f"{dropped[0][0].place}: {dropped[0][1][0]!a}" if dropped else None,
    )
    write_json(part_path(folder, part.number, "json"), result)
    return result


def find_result(part: Part, folder: Path) -> PartResult | None:
    """Return what a part came to if it is whole, else None."""
    return read_json(PartResult, part_path(folder, part.number, "json"), "part", "remove it, and build again")


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Group documents that are encoded together."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += _size(document)
        if size >= _BATCH_SIZE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(document: Document) -> int:
    if isinstance(document.content, list):  # messages
        return sum(len(str(message)) for message in document.content)
    return len(document.content)


def _encode(batch: Sequence[Document], options: BuildOptions) -> list[Tokens | UnreadableCorpus]:
    """Return the token ids of each document, or why it has none."""
    if not options.reads_text:
        return [each.error or _check_range(each, options.vocab_size or MAX_IDS) for each in batch]
    # SentencePiece gives a token for an empty text, too.
    encoded = iter(_encode_texts([each for each in batch if each.content], options))
    return [each.error or (next(encoded) if each.content else _NOTHING) for each in batch]


def _encode_texts(
    documents: Sequence[Document], options: BuildOptions
) -> Iterable[Tokens | UnreadableCorpus]:
    """Yield the ids of documents that have a text; one that the tokenizer fails for is encoded by itself."""
    tokenizer = _tokenizer(str(options.tokenizer))
    try:
        encoded = tokenizer.encode_batch([document.content for document in documents])
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # noqa: BLE001 - a panic of a tokenizer in Rust is no Exception
        if len(documents) > 1:
            for document in documents:
                yield from _encode_texts([document], options)
        else:
            said = " ".join(str(error).split())[:200] or type(error).__name__
            remedy = "change its text or the tokenizer, or leave such documents out with --on-error skip"
            yield documents[0].unreadable(f"the tokenizer cannot encode it: {said}", remedy)
        return
    for document, ids in zip(documents, encoded, strict=True):
        yield _without_eot(document, ids, tokenizer, options)


def _without_eot(
    document: Document, ids: Tokens, tokenizer: Tokenizer, options: BuildOptions
) -> Tokens | UnreadableCorpus:
    """Return the ids of a text, which must not hold the end-of-text token: it would end the document."""
    eot = options.eot
    if not (ids == eot).any():
        return ids
    others = tokenizer.encode_without(document.content, eot)
    if others is not None and not (others == eot).any():
        return others
    what = f"its text holds {tokenizer.decode([eot])!a}, which is encoded as the end-of-text token {eot}"
    other = "255, which no text holds," if options.tokenizer == "bytes" else "another token"
    remedy = f"choose {other} with --eot, or leave such documents out with --on-error skip"
    return document.unreadable(what, remedy)


def _render_chat(document: Document, options: BuildOptions) -> Document:
    """Return a conversation as token ids and their loss mask, or with the error that names it."""
    if document.error is not None or not document.content:
        return document._replace(content=_NOTHING)
    assert options.chat is not None
    tokenizer = _tokenizer(str(options.tokenizer))
    said = {f"message {number}": message for number, message in enumerate(document.content)}
    for place, message in {**said, "tools": document.tools}.items():
        if (name := tokenizer.find_special(json.dumps(message, ensure_ascii=False))) is not None:
            what = f"{place} holds {name!r}, the name of a special token"
            remedy = "change the text, or leave such documents out with --on-error skip"
            return document.failed(document.unreadable(what, remedy))
    try:
        text, targets = render(options.chat, document.content, document.tools)
        if len(text) > TEXT_CHARS:
            raise ValueError(f"is longer than {TEXT_CHARS:,} characters")
        marked = tokenizer.encode_marked_up(text)
        assert marked is not None
    except (KeyboardInterrupt, SystemExit, MemoryError, AssertionError):
        raise
    except BaseException as error:  # noqa: BLE001 - a panic of a tokenizer in Rust is no Exception
        return document.failed(document.unreadable(" ".join(str(error).split())[:400]))
    ids, offsets = marked
    if (ids[:-1] == options.eot).any():
        return document.failed(
            document.unreadable(
                f"the chat template puts the end-of-text token {options.eot} inside the conversation",
                "choose a token that ends documents alone with --eot",
            )
        )
    mask = np.zeros(len(ids), np.uint8)
    for start, stop in targets:
        inside = np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > start))
        if inside.size:
            mask[inside[0] : inside[-1] + 1] = 1
    return document._replace(content=ids, mask=mask)


def _dropped(document: Document, options: BuildOptions) -> str:
    """Return the characters of a document for which the tokenizer has no token."""
    return "" if not options.reads_text else _tokenizer(str(options.tokenizer)).dropped(document.content)


def _check_range(document: Document, limit: int) -> Tokens | UnreadableCorpus:
    ids: Tokens = document.content
    if ids.size and (ids.min() < 0 or ids.max() >= limit):
        wrong = next(value for value in ids.tolist() if not 0 <= value < limit)
        return document.unreadable(
            f"token id {wrong} is outside [0, {limit})", "is it the column of ids, and their tokenizer?"
        )
    return ids


@lru_cache(maxsize=1)  # a process that builds many parts reads the tokenizer once
def _tokenizer(source: str) -> Tokenizer:
    # As many processes as cores build parts; read when the library is first imported.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return open_tokenizer(source)


def _chooser(options: BuildOptions) -> Callable[[Document], int]:
    """Return what chooses a document's split by a hash of its content, whatever its file and place.

    xxh3-64 of its UTF-8 text, or of its ids as <u4, is compared with the shares: with val=0.001 and test=0.01
    the lowest 1/1000 of the hashes is `val`, the next 1/100 is `test`, and the others are `train`.
    """
    bounds = [round(share * 2**64) for share in accumulate(split.share for split in options.splits)]

    def choose(document: Document) -> int:
        if not bounds:
            return 0
        content = document.content
        if (digest := document.digest) is None:
            if isinstance(content, list):
                data = orjson.dumps(content, option=orjson.OPT_SORT_KEYS)
            else:
                data = content.encode() if isinstance(content, str) else content.astype("<u4").tobytes()
            digest = xxhash.xxh3_64_intdigest(data)
        found = bisect_right(bounds, digest)
        return (found + 1) % (len(bounds) + 1)  # `train`, number 0, takes what no share does

    return choose


class _Writer:
    """Collects the documents of one split and writes them."""

    def __init__(self, options: BuildOptions, number: int, folder: Path, name: str, files: ExitStack) -> None:
        self.name = name
        self._dtype, self._is_packed = options.part_dtype, options.is_packed
        self._eot = np.array([options.eot], self._dtype)
        paths = (part_path(folder, number, f"{name}.{kind}") for kind in ("tokens", "lengths"))
        self._tokens_file, self._lengths_file = (files.enter_context(publishing(path)) for path in paths)
        self._mask_file: BinaryIO | None = None
        if options.has_masks:
            self._mask_file = files.enter_context(publishing(part_path(folder, number, f"{name}.mask")))
        self._masks: list[Tokens] = []
        self._num_targets = self._num_weighted = self._num_rounded = 0
        self._keep = options.keep
        self._kept_file: BinaryIO | None = None
        if options.keep:
            self._kept_file = files.enter_context(publishing(part_path(folder, number, f"{name}.kept")))
        self._pieces: list[Tokens] = []
        self._lengths: list[int] = []
        self._kept: list[Kept] = []
        self._length = 0  # of the document that is not complete yet
        self._num_written = 0  # tokens of that document that are in the file already
        self._num_documents = self._num_tokens = self._largest_id = 0

    def add(self, ids: Tokens, document: Document) -> bool:
        """Take a document, or the next piece of one; return False if it ends without a token."""
        if len(ids):
            self._pieces.append(ids)
            self._length += len(ids)
        if not document.is_last or not self._length:
            return not document.is_last
        if self._mask_file is not None:
            given = np.ones(len(ids), WEIGHT_DTYPE) if document.mask is None else document.mask
            mask = given.astype(WEIGHT_DTYPE)
            self._num_rounded += int(np.count_nonzero(mask != given))
            self._masks.append(mask)
        if self._is_packed:  # `flush` finds where documents end
            return len(ids) > 0
        # Rows of data sets often bring their end-of-text token.
        if not len(ids) or ids[-1] != self._eot[0]:
            self._pieces.append(self._eot)
            self._length += 1
            if self._mask_file is not None:  # who learns the last token learns to stop behind it
                self._masks.append(mask[-1:])
        self._lengths.append(self._length)
        self._kept.append(document.kept)
        self._length = self._num_written = 0
        return True

    def forget(self) -> None:
        """Take back the pieces of a document that is not complete."""
        left = self._length - self._num_written
        while left:
            left -= len(self._pieces.pop())
        if self._num_written:
            self._tokens_file.seek(-self._num_written * self._dtype.itemsize, os.SEEK_END)
            self._tokens_file.truncate()
            self._num_tokens -= self._num_written
        self._length = self._num_written = 0

    def flush(self) -> None:
        """Write what was added."""
        if not self._pieces:
            return
        tokens = np.concatenate(self._pieces)
        self._largest_id = max(self._largest_id, int(tokens.max()))
        if self._largest_id > np.iinfo(self._dtype).max:  # the cast below would wrap around
            raise RuntimeError(f"the tokenizer gave id {self._largest_id}, beyond its vocabulary")
        self._tokens_file.write(tokens.astype(self._dtype, copy=False).data)
        if self._is_packed:
            self._lengths = self._ended(tokens)
        self._lengths_file.write(np.array(self._lengths, LENGTH_DTYPE).data)
        if self._mask_file is not None:
            masks = np.concatenate(self._masks)
            self._mask_file.write(masks.data)
            self._num_targets += int(np.count_nonzero(masks))
            self._num_weighted += int(np.count_nonzero((masks != 0) & (masks != 1)))
            self._masks = []
        if self._kept_file is not None:
            append(self._kept_file, record_batch(self._keep, self._kept))
        self._num_documents += len(self._lengths)
        self._num_tokens += tokens.size
        self._num_written = self._length
        self._pieces, self._lengths, self._kept = [], [], []

    def _ended(self, tokens: Tokens) -> list[int]:
        """Return the lengths of the documents that end in a running text; the last one may go on."""
        ends = np.flatnonzero(tokens == self._eot[0]) + 1
        begun = self._length - tokens.size  # tokens of a document that began before
        self._length = int(tokens.size - ends[-1] if ends.size else self._length)
        return np.diff(ends, prepend=-begun).tolist()  # type: ignore[no-any-return]

    def result(self) -> PartSplit:
        """Return the counts."""
        return PartSplit(
            num_documents=self._num_documents,
            num_tokens=self._num_tokens,
            largest_id=self._largest_id,
            num_targets=self._num_tokens if self._mask_file is None else self._num_targets,
            num_weighted=self._num_weighted,
            num_rounded=self._num_rounded,
        )
