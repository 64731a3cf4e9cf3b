"""The text of a corpus as bytes of UTF-8, for items that other tokens, or other neighbours, cut otherwise.

    tokens   | The| cap|ital|          text    T h e c a p i t a l
    starts   0    3    6                       every byte has a place; a token has those of its text

White space is left out, so that lines which are broken or indented otherwise are the same text, and a run of
blanks is no text that corpora share.

The text is not kept, but where each block of tokens begins in it: 8 bytes for 16,384 tokens. The end of a
document is a byte that no UTF-8 has, so nothing is found across it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.progress import Progress
from corpus_server.corpus.tokenizers import Tokenizer
from corpus_server.errors import TextUnavailable
from corpus_server.pieces import Int64Array, expanded

END: Final = 0xFF
"""Between documents, and instead of ids that the tokenizer does not know."""

_WHITE: Final = b" \t\n\r\v\f"
_BLOCK: Final = 1 << 14  # tokens
_COMPARED: Final = 1 << 12  # tokens, of which the text is compared with what the tokenizer makes of them
_COLUMNS: Final = ("content", "starts", "blocks")


def compared(text: str) -> NDArray[np.uint8]:
    """Return the bytes of a text that are compared: those of UTF-8 without white space of ASCII."""
    return np.frombuffer(text.encode().translate(None, _WHITE), np.uint8)


def where_compared(text: bytes) -> Int64Array:
    """Return where in a text in UTF-8 the bytes are that are compared."""
    return np.flatnonzero(
        np.isin(np.frombuffer(text, np.uint8), np.frombuffer(_WHITE, np.uint8), invert=True)
    )


class DecodedText:
    """The text of a corpus.

    Attributes:
        num_tokens: bytes of the text.
        dtype: of its bytes.
    """

    dtype: Final = np.dtype(np.uint8)

    def __init__(
        self, corpus: Corpus, content: NDArray[np.uint8], starts: Int64Array, blocks: Int64Array
    ) -> None:
        self._corpus, self._content, self._starts, self._blocks = corpus, content, starts, blocks
        self._sizes = np.diff(starts)
        self.num_tokens = int(blocks[-1])

    @classmethod
    def of(cls, corpus: Corpus, progress: Progress | None = None) -> Self:
        """Read the corpus once, to know where its blocks begin in the text.

        Raises:
            TextUnavailable: there is no tokenizer, or the texts of its tokens do not join to a text.
        """
        texts = _texts(corpus)
        content = np.frombuffer(b"".join(texts), np.uint8)
        starts = np.concatenate(([0], np.cumsum([len(each) for each in texts]))).astype(np.int64)
        blocks, sizes = [0], np.diff(starts)
        for first in range(0, corpus.num_tokens, _BLOCK):
            ids = _ids(corpus, first, sizes.size)
            blocks.append(blocks[-1] + int(sizes[ids].sum()))
            if progress is not None and not first % (_BLOCK << 6):
                itemsize = corpus.dtype.itemsize
                progress("measuring the text", first * itemsize, corpus.num_tokens * itemsize, first)
        return cls(corpus, content, starts, np.array(blocks, np.int64))

    def save(self, folder: Path) -> None:
        """Write the tables to a folder, from which other processes map them."""
        for name, column in zip(_COLUMNS, (self._content, self._starts, self._blocks), strict=True):
            np.save(folder / f"text-{name}.npy", np.asarray(column))

    @classmethod
    def load(cls, folder: Path, corpus: Corpus) -> Self:
        """Map tables that were saved."""
        return cls(corpus, *(np.load(folder / f"text-{name}.npy", mmap_mode="r") for name in _COLUMNS))

    def read(self, start: int, buffer: NDArray[np.uint8]) -> None:
        """Fill an array with the bytes of the text from `start` on."""
        done, block = 0, int(self._blocks.searchsorted(start, side="right")) - 1
        while done < buffer.size:
            ids = _ids(self._corpus, block * _BLOCK, self._sizes.size)
            _, places = expanded(self._starts[ids], self._sizes[ids])
            part = self._content[places[start + done - int(self._blocks[block]) :]][: buffer.size - done]
            buffer[done : done + part.size] = part
            done, block = done + part.size, block + 1

    def borders(self, start: int, stop: int) -> Int64Array:
        """Return the first byte of each of tokens [start, stop), and the one behind the last."""
        found = [np.empty(0, np.int64)]
        for number in range(start // _BLOCK, -(-stop // _BLOCK)):
            sizes = self._sizes[_ids(self._corpus, number * _BLOCK, self._sizes.size)]
            ends = sizes.cumsum() + int(self._blocks[number])
            its = slice(max(0, start - number * _BLOCK), max(0, stop - number * _BLOCK))
            if number == start // _BLOCK:
                found.append((ends - sizes)[its][:1])
            found.append(ends[its])
        return np.concatenate(found)

    def tokens_at(self, places: Int64Array) -> Int64Array:
        """Return the token of which each byte of the text is a part."""
        blocks = self._blocks.searchsorted(places, side="right") - 1
        found = np.empty(places.size, np.int64)
        order = np.argsort(blocks, kind="stable")
        numbers, begins = np.unique(blocks[order], return_index=True)
        ends_of = np.append(begins, order.size)[1:]
        for number, first, stop in zip(numbers.tolist(), begins.tolist(), ends_of.tolist(), strict=True):
            its = order[first:stop]
            ids = _ids(self._corpus, number * _BLOCK, self._sizes.size)
            ends = self._sizes[ids].cumsum() + int(self._blocks[number])
            found[its] = number * _BLOCK + ends.searchsorted(places[its], side="right")
        return found


def _ids(corpus: Corpus, first: int, size: int) -> Int64Array:
    """Return the ids of a block; those beyond the vocabulary are the last one of the table, `END`."""
    ids = np.empty(min(_BLOCK, corpus.num_tokens - first), corpus.dtype)
    read_tokens(corpus, first, ids)
    known = ids.astype(np.int64)  # 8 bits hold no number of the last one
    known[(known < 0) | (known >= size)] = size - 1
    return known


def _texts(corpus: Corpus) -> list[bytes]:
    """Return the bytes of each id, and one of an id that is not known."""
    tokenizer = corpus.tokenizer
    if tokenizer is None:
        remedy = "name it: NAME=PATH,tokenizer=FILE, or look for token ids, without --by text"
        raise TextUnavailable(f"corpus {corpus.name!r} has no tokenizer, and so no text", remedy=remedy)
    end, texts = bytes([END]), list[bytes]()
    for token in range(tokenizer.vocab_size):
        known = tokenizer.bytes_of(token) if tokenizer.knows(token) and token != corpus.eot else end
        if known is None:
            raise _not_joined(corpus)
        texts.append(known)
    texts.append(end)
    _compare(corpus, tokenizer, texts)
    return [each.translate(None, _WHITE) for each in texts]


def _compare(corpus: Corpus, tokenizer: Tokenizer, texts: list[bytes]) -> None:
    ids = _ids(corpus, 0, len(texts))[:_COMPARED].tolist()
    ids = [token for token in ids if token < len(texts) - 1 and texts[token] != bytes([END])]
    joined = b"".join(texts[token] for token in ids).decode(errors="replace")
    # A first token may lack the space before it, and the last one the rest of a character.
    one, other = (each.replace("\ufffd", "").removeprefix(" ") for each in (joined, tokenizer.decode(ids)))
    if one != other:
        raise _not_joined(corpus)


def _not_joined(corpus: Corpus) -> TextUnavailable:
    return TextUnavailable(
        f"the texts of the tokens of corpus {corpus.name!r} do not join to a text: its tokenizer "
        f"({corpus.tokenizer_name}) changes them by their neighbours",
        remedy="look for tokens, without --by text",
    )


def read_tokens(corpus: Corpus, start: int, tokens: NDArray[np.integer]) -> None:
    """Fill an array with the tokens of a corpus from `start` on, read from its files."""
    places = corpus.pieces(np.array([start]), np.array([start + tokens.size])).places
    done = 0
    for number, first, count in places.tolist():
        shard, into = corpus.shards[number], tokens[done : done + count]
        own = into if shard.dtype == into.dtype else np.empty(count, shard.dtype)
        shard.file.read_into(shard.data_offset + first * shard.dtype.itemsize, memoryview(own.data).cast("B"))
        if own is not into:
            into[:] = own
        done += count
