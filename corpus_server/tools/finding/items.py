"""What is looked for: texts, or token ids, by items.

An item is a question of an evaluation, say. It may have several texts, of several fields: n-grams lie inside
one of them, and the share that is covered counts the tokens of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.errors import InvalidParameter, TextUnavailable
from corpus_server.tools.building.inputs import fetch_source, find_inputs
from corpus_server.tools.building.job import BuildOptions
from corpus_server.tools.building.sources import check_text_fields, plan_parts, read_documents
from corpus_server.tools.finding.ngrams import MAX_TOKENS
from corpus_server.tools.hub import Say

Text = str | NDArray[np.integer]
EncodeBatch = Callable[[Sequence[str]], Sequence[NDArray[np.integer]]]

MAX_ITEMS: Final = 1 << 22
_TEXTS_AT_ONCE: Final = 1 << 10


@dataclass(kw_only=True, slots=True)
class Items:
    """Texts to look for, as they were given.

    Attributes:
        sources: files, or how items were given on the command line.
        places: of each item its source and its number there, counted from 0.
        texts: of each item.
    """

    sources: list[str] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    texts: list[tuple[Text, ...]] = field(default_factory=list)

    def add(self, source: str, number: int, texts: tuple[Text, ...]) -> None:
        """Add an item.

        Raises:
            InvalidParameter: there are too many.
        """
        if not self.sources or self.sources[-1] != source:
            self.sources.append(source)
        if len(self.texts) == MAX_ITEMS:
            accepted = f"at most {MAX_ITEMS:,} items"
            remedy = "look for them in several passes"
            raise InvalidParameter.expected("items", accepted, f"more, in {source}", remedy=remedy)
        self.places.append((len(self.sources) - 1, number))
        self.texts.append(texts)

    @property
    def have_texts(self) -> bool:
        """Whether there are texts, for which a tokenizer is needed."""
        return any(isinstance(each, str) for texts in self.texts for each in texts)


def read_items(
    sources: Sequence[str], say: Say, *, fields: Sequence[str], column: str | None, include: Sequence[str]
) -> Iterator[tuple[str, int, tuple[Text, ...]]]:
    """Yield the source, the number and the texts of each item of some files.

    A file of text is an item; of JSON lines, CSV, Parquet and Arrow each record is one.

    Args:
        fields: that hold texts, or lists of texts; the first one holds a text.
        column: holds token ids, instead.
        include: patterns of names of files that are read as text, as for `build`.

    Raises:
        UnreadableCorpus: a file, or a record, is not what it should be.
    """
    inputs = find_inputs([fetch_source(each, include, say) for each in sources], include).inputs
    first, *others = fields
    # `tokenizer` and `eot` are for what a build makes of the documents.
    options = BuildOptions(
        tokenizer="bytes", text_field=first, column=column, keep=tuple(others), eot=0, vocab_size=None
    )
    names, before, number = {each.path: each.name for each in inputs}, "", -1
    check_text_fields(inputs, options)
    for part in plan_parts(inputs):
        for document in read_documents(part, options):
            document.check()
            number = number + 1 if document.path == before else 0
            before = document.path
            texts = (document.content,) if column is not None else tuple(_strings(document.content))
            yield names[before], number, (*texts, *_strings(document.kept))


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts in a value of JSON."""
    if isinstance(value, str):
        if value:
            yield value
    elif isinstance(value, dict):
        yield from _strings(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """Items as tokens of one tokenizer.

    Attributes:
        tokens: `(t,)`: those of all texts, one after another; as small integers as hold them.
        text_ends: `(texts,) int64`: where each text ends.
        texts_of: `(items + 1,) int64`: the first text of each item; then the number of all.
    """

    tokens: NDArray[np.unsignedinteger[Any]]
    text_ends: NDArray[np.int64]
    texts_of: NDArray[np.int64]

    @cached_property
    def item_borders(self) -> NDArray[np.int64]:
        """Where the tokens of each item begin; then the number of all: `(items + 1,)`."""
        borders: NDArray[np.int64] = np.concatenate(([0], self.text_ends))[self.texts_of]
        return borders

    def items_at(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the item that holds each of some tokens."""
        items: NDArray[np.int64] = self.item_borders.searchsorted(tokens, side="right") - 1
        return items

    def is_long_enough(self, n: int) -> NDArray[np.bool_]:
        """Tell which items have a text of n tokens."""
        texts = np.diff(self.text_ends, prepend=0) >= n
        before = np.concatenate(([0], texts.cumsum()))[self.texts_of]
        long_enough: NDArray[np.bool_] = np.diff(before) > 0
        return long_enough


def encode(items: Items, encode_batch: EncodeBatch | None, name: str, eot: int | None) -> Encoded:
    """Return the items as tokens.

    Args:
        encode_batch: makes tokens of texts, as the corpus's tokenizer does.
        name: of the corpus, in errors.
        eot: end of text, which a text holds only by mistake: n-grams lie before it, or behind.

    Raises:
        TextUnavailable: there are texts, and nothing makes tokens of them.
        InvalidParameter: there are too many tokens, or a text is no Unicode.
    """
    if encode_batch is None and items.have_texts:
        remedy = "name it: NAME=PATH,tokenizer=FILE, or give token ids with --tokens or --column"
        raise TextUnavailable(
            f"corpus {name!r} has no tokenizer, without which no text is found in it", remedy=remedy
        )
    flat = [each for texts in items.texts for each in texts]
    borders = np.concatenate(([0], np.cumsum([len(texts) for texts in items.texts], dtype=np.int64)))
    parts: list[NDArray[np.unsignedinteger[Any]]] = [np.empty(0, np.uint8)]
    counts, lengths = [0], []
    num_tokens = 0
    for first in range(0, len(flat), _TEXTS_AT_ONCE):
        found = []
        given = flat[first : first + _TEXTS_AT_ONCE]
        for tokens, text in zip(_encoded(given, encode_batch), given, strict=True):
            pieces = [tokens]
            if isinstance(text, str) and (ends := np.flatnonzero(tokens == eot)).size:
                pieces = np.split(tokens, np.union1d(ends, ends + 1))
            found += pieces
            counts.append(len(pieces))
        lengths += [each.size for each in found]
        joined = np.concatenate(found)
        parts.append(joined.astype(np.min_scalar_type(joined.max(initial=0))))
        num_tokens += joined.size
        if num_tokens > MAX_TOKENS:
            raise InvalidParameter(
                f"the items have more than {MAX_TOKENS:,} tokens, which are the most for one pass",
                parameter="items",
                remedy="name fewer items, and look for the others in another pass",
            )
    return Encoded(
        tokens=np.concatenate(parts),
        text_ends=np.cumsum(lengths, dtype=np.int64),
        texts_of=np.cumsum(counts)[borders],
    )


def _encoded(texts: Sequence[Text], encode_batch: EncodeBatch | None) -> list[NDArray[np.integer]]:
    strings = [each for each in texts if isinstance(each, str)]
    encoded = iter(() if encode_batch is None else encode_batch(strings))
    return [next(encoded) if isinstance(each, str) else each.astype(np.uint32) for each in texts]
