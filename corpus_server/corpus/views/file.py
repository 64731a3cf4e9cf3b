"""The file of a view: a multiplicity for each document of a corpus, and an index of them. Little-endian.

    byte  0  b"CORPVIEW"
          8  <u8 version, 2
         16  <u8 bytes of the header, with the spaces that fill it up to a multiple of 8
         24  <u8 xxh3-64 of the header
         32  the header, JSON
             <i8 first_document[G], group_token[G + 1], group_chosen[G + 1]
             the multiplicities, in the smallest of these encodings:
               bits    one bit a document, the lowest first; for multiplicities 0 and 1
               bytes   <u1 a document
               words   <u2 a document
               runs    <i8 first document of each of R runs, then <u2 its multiplicity
             zeros up to a multiple of 8
             <i8 layer_token[L + 1], layer_group[L]
             <u4 section_end[L, 32], or <i8 if a pass of a group has 2^32 tokens
             <u4 section_check[G, 32]
             <u2 layer_reached[L]

A *group* is up to 256 documents of one shard, numbered from the shard's first on. Only groups with a chosen
document are listed. `group_token` and `group_chosen` are the view's tokens and documents before each.

Passes of a group between two multiplicities that it has hold the same documents: they are a *layer*. With
multiplicities 1, 0, 3, 3 of documents A, B, C, D:

    layer 0, one pass      A C D
    layer 1, two passes    C D | C D

A *section* is 8 documents of a group. `section_end` is the tokens of one pass up to the end of each.
`section_check` follows from where its documents begin in the corpus, and where the last one ends: the sum of
number i of these 9 times K^(i + 1), modulo 2^64, divided by 2^32, with K = 0x9E3779B97F4A7C15. (Behind the
last document of a shard its end is repeated.) Version 1 ends behind the multiplicities.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus_server.corpus.files import Closing, OpenFile
from corpus_server.corpus.formats.documents import runs_of
from corpus_server.corpus.formats.layout import read_header
from corpus_server.corpus.publish import publishing
from corpus_server.pieces import Int64Array, at_or_below, expanded
from corpus_server.user_files import parse_json

GROUP: Final = 256
"""Documents of a group: the index takes 24 bytes for them."""

SECTION: Final = 8
"""Documents of a section, which take 8 bytes. With 16 finding windows of 1,025 takes 1.1 times as long."""

SECTIONS: Final = GROUP // SECTION  # a power of two

_SPARE_BITS: Final = 14  # of whole bytes that hold a run of bits, at most

MAX_MULTIPLICITY: Final = 2**16 - 1

_MAGIC: Final = b"CORPVIEW"
_WITHOUT_LAYERS, _VERSION = 1, 2
_HEADER: Final = "<8sQQQ"
_HEADER_BYTES: Final = struct.calcsize(_HEADER)
_AGAIN: Final = "was the copy interrupted? Copy it again, or make it with corpus-server view create"

Multiplicities = NDArray[np.uint8 | np.uint16]


class Groups(NamedTuple):
    """The index of a view, see above."""

    first_document: Int64Array
    token: Int64Array
    chosen: Int64Array


class Layers(NamedTuple):
    """Where positions of a view lie: layers in the order of the view, and sections of each.

    Attributes:
        token: `(n + 1,)`, tokens of the view before each; then of all.
        group: `(n,)`, the number of its group.
        ends: `(n, SECTIONS)`, tokens of one pass up to the end of each section.
        checks: `(groups, SECTIONS)`, see `section_checks`.
        reached: `(n,)`, the multiplicity that its documents reach.
    """

    token: Int64Array
    group: Int64Array
    ends: NDArray[np.uint32 | np.int64]
    checks: NDArray[np.uint32]
    reached: NDArray[np.uint16]

    @classmethod
    def joined(cls, parts: Sequence[Layers]) -> Layers:
        """Return layers one part after another."""
        nothing = np.empty((0, SECTIONS), dtype=np.uint32)
        none = cls(np.zeros(1, np.int64), np.empty(0, np.int64), nothing, nothing, np.empty(0, np.uint16))
        parts = [none, *parts]
        token = np.concatenate([np.zeros(1, np.int64), *(np.diff(part.token) for part in parts)]).cumsum()
        first = accumulate((len(part.checks) for part in parts), initial=0)
        group = np.concatenate([part.group + number for part, number in zip(parts, first, strict=False)])
        ends, checks, reached = (np.concatenate(column) for column in list(zip(*parts, strict=True))[2:])
        if ends.max(initial=0) < 2**32:
            ends = ends.astype(np.uint32)
        return cls(token, group, ends, checks, reached)


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewHeader:
    """What the file says of a view."""

    fingerprints: Mapping[str, str]  # of the corpus
    documents: str  # digest of where the corpus's documents end
    made: Mapping[str, Any]  # the options with which it was made, as given; says nothing about the content
    metadata: str | None  # digest of the metadata that the expressions were evaluated over
    num_documents: int  # of the corpus
    num_chosen: int  # documents of the view
    num_tokens: int  # of the view
    num_groups: int
    encoding: str
    num_entries: int  # bytes of `bits`; documents, or runs
    digest: str  # xxh3-128 of the groups and multiplicities
    num_layers: int = 0
    section_ends: str = "<u4"
    layers_digest: str = ""  # xxh3-128 of what follows the multiplicities

    def fingerprint(self, of_corpus: str) -> str:
        """Return the view's fingerprint, of the kind of the corpus's: the same in both versions."""
        kind, _, _ = of_corpus.partition("-")
        made_of = f"corpus-server view 1\n{of_corpus}\n{self.documents}\n{self.digest}\n"
        return f"{kind}-{hashlib.sha256(made_of.encode()).hexdigest()}"


def write_view(
    path: Path, multiplicities: Multiplicities, groups: Groups, layers: Layers, *, header: Mapping[str, Any]
) -> ViewHeader:
    """Publish a view; raises OSError. `header` has the fields that do not follow from the arrays."""
    encoding, entries, encoded = _encoded(multiplicities)
    arrays = [*groups, *encoded]
    fill = np.zeros(-sum(each.nbytes for each in arrays) % 8, dtype=np.uint8)
    its_layers: list[np.ndarray] = [fill, *layers]
    made = ViewHeader(
        **header,
        num_documents=multiplicities.size,
        num_chosen=int(groups.chosen[-1]),
        num_tokens=int(groups.token[-1]),
        num_groups=groups.first_document.size,
        encoding=encoding,
        num_entries=entries,
        digest=_digest(arrays),
        num_layers=layers.group.size,
        section_ends=layers.ends.dtype.str,
        layers_digest=_digest(its_layers),
    )
    text = json.dumps(asdict(made), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    with publishing(path) as file:
        file.write(struct.pack(_HEADER, _MAGIC, _VERSION, len(text), xxhash.xxh3_64_intdigest(text)) + text)
        for each in (*arrays, *its_layers):
            file.write(each.data)
    return made


def _digest(parts: Iterable[Any]) -> str:
    """Return the digest of arrays or bytes, one behind the other."""
    digest = xxhash.xxh3_128()
    for each in parts:
        digest.update(memoryview(each))
    return f"xxh3-{digest.hexdigest()}"


def _encoded(multiplicities: Multiplicities) -> tuple[str, int, list[np.ndarray]]:
    most = int(multiplicities.max(initial=0))
    starts = np.flatnonzero(np.diff(multiplicities, prepend=multiplicities[:1] + 1)).astype("<i8")
    num_bytes = -(-multiplicities.size // 8) if most <= 1 else multiplicities.size * (1 if most < 256 else 2)
    if 10 * starts.size < num_bytes:
        return "runs", starts.size, [starts, multiplicities[starts].astype("<u2")]
    if most <= 1:
        packed = np.packbits(multiplicities.astype(bool), bitorder="little")
        return "bits", packed.size, [packed]
    encoding, dtype = ("bytes", "<u1") if most < 256 else ("words", "<u2")
    return encoding, multiplicities.size, [multiplicities.astype(dtype)]


class ViewFile(Closing):
    """An open view, mapped; its arrays are compared with their digests: 0.1 s for 10^8 documents.

    Raises:
        UnreadableCorpus: it is cut, changed or none.

    Attributes:
        header: see `ViewHeader`.
        groups: see `Groups`.
        layers: see `Layers`; None in a file of version 1.
    """

    def __init__(self, path: Path) -> None:
        with ExitStack() as on_error:
            self.file = file = on_error.enter_context(OpenFile(path))
            if file.head(len(_MAGIC)) != _MAGIC:
                raise file.unreadable("is no view: it does not begin as one", "name a file of `view create`")
            _, version, size, checksum = read_header(file, _HEADER, "the header of a view", remedy=_AGAIN)
            if version not in (_WITHOUT_LAYERS, _VERSION):
                known = f"{_WITHOUT_LAYERS}, {_VERSION}"
                raise file.unreadable(f"view version {version} is unknown (known: {known})", _AGAIN)
            if size > file.size_bytes - _HEADER_BYTES:
                raise file.unreadable(f"{file.size_bytes} bytes end inside its header", _AGAIN)
            text = file.read(_HEADER_BYTES, size)
            if xxhash.xxh3_64_intdigest(text) != checksum:
                raise file.unreadable("its header is damaged", _AGAIN)
            self.header = ViewHeader(**parse_json(text))
            count, number = self.header.num_groups, self.header.num_entries
            groups = [("<i8", count), ("<i8", count + 1), ("<i8", count + 1)]
            encoded = {
                "bits": [("<u1", number)],
                "bytes": [("<u1", number)],
                "words": [("<u2", number)],
                "runs": [("<i8", number), ("<u2", number)],
            }[self.header.encoding]
            count = self.header.num_layers
            layers = [
                *[("<i8", count + 1), ("<i8", count), (self.header.section_ends, count * SECTIONS)],
                *[("<u4", self.header.num_groups * SECTIONS), ("<u2", count)],
            ]
            borders = [_HEADER_BYTES + size]
            borders.append(borders[0] + _num_bytes(groups + encoded))
            if version == _VERSION:
                at = borders[-1] + -borders[-1] % 8
                borders.append(at + _num_bytes(layers))
            if file.size_bytes != borders[-1]:
                raise file.unreadable(f"holds {file.size_bytes} bytes, its header says {borders[-1]}", _AGAIN)
            self._borders = borders
            mapped = file.map()
            arrays = _arrays(mapped, borders[0], groups + encoded)
            self.groups, self._arrays, self.layers = Groups(*arrays[:3]), arrays[3:], None
            if version == _VERSION:
                token, group, ends, checks, reached = _arrays(mapped, at, layers)
                shape = (-1, SECTIONS)
                self.layers = Layers(token, group, ends.reshape(shape), checks.reshape(shape), reached)
            if (problem := self.find_problem()) is not None:
                raise file.unreadable(problem, _AGAIN)
            on_error.pop_all()

    def find_problem(self) -> str | None:
        """Compare the arrays with their digest; return what is wrong, or None."""
        digests = self.header.digest, self.header.layers_digest
        buffer = memoryview(bytearray(1 << 20))
        for (begin, end), digest in zip(pairwise(self._borders), digests, strict=False):
            if _digest(self._parts(begin, end, buffer)) != digest:
                return "its arrays differ from the ones written"
        return None

    def _parts(self, begin: int, end: int, buffer: memoryview) -> Iterator[memoryview]:
        """Yield bytes [begin, end) of the file, each part in the place of the one before."""
        for at in range(begin, end, len(buffer)):
            part = buffer[: end - at]
            self.file.read_into(at, part)
            yield part

    def multiplicities(self, first: Int64Array, count: int) -> Multiplicities:
        """Return those of `count` documents of the corpus from each of `first` on, then 0: `(k, count)`."""
        total = self.header.num_documents
        last = total - count - (_SPARE_BITS if self.header.encoding == "bits" else 0)
        if last >= 0:
            found = self._runs(first.clip(max=last), count, *self._arrays)
        else:
            found = np.zeros((first.size, count), dtype=np.uint16)
        for start in set(first[first > last].tolist()):  # at the end of the file
            its = self._decoded(start, min(start + count, total)).tolist()
            found[first == start] = its + [0] * (count - len(its))
        return found

    def _runs(
        self, first: Int64Array, count: int, values: NDArray[Any], times: NDArray[np.uint16] | None = None
    ) -> Multiplicities:
        """Return what `multiplicities` does; whole bytes of bits may follow."""
        if times is not None:
            low, high = at_or_below(values, first), at_or_below(values, first + count - 1)
            which, runs = expanded(low, high + 1 - low)
            begins = count * which + np.maximum(values[runs] - first[which], 0)
            return times[runs].repeat(np.diff(begins, append=count * first.size)).reshape(-1, count)
        if self.header.encoding != "bits":
            return runs_of(values, first, count)
        size = (count + _SPARE_BITS) // 8  # bytes that hold them, wherever in a byte they begin
        bits = np.unpackbits(runs_of(values, first >> 3, size), bitorder="little")
        return runs_of(bits, 8 * size * np.arange(first.size) + (first & 7), count)

    def decoded(self, start: int, stop: int) -> Multiplicities:
        """Return the multiplicities of documents [start, stop) of the corpus."""
        with self.file.unchanged():
            return self._decoded(start, stop)

    def _decoded(self, start: int, stop: int) -> Multiplicities:
        first, *rest = self._arrays
        if self.header.encoding == "bits":
            bits = np.unpackbits(first[start >> 3 : -(-stop // 8)], bitorder="little")
            return bits[start & 7 : (start & 7) + stop - start].astype(np.uint16)
        if not rest:
            return first[start:stop].astype(np.uint16)
        low, high = first.searchsorted((start, stop - 1), side="right").tolist()
        bounds = np.concatenate(([start], first[low:high], [stop]))
        return rest[0][low - 1 : high].astype(np.uint16).repeat(np.diff(bounds))

    def close(self) -> None:
        """Close the file."""
        self.file.close()


Parts = list[tuple[str, int]]
"""Arrays one behind the other: dtype, items."""


def _num_bytes(parts: Parts) -> int:
    return sum(np.dtype(dtype).itemsize * size for dtype, size in parts)


def _arrays(mapped: Any, at: int, parts: Parts) -> list[NDArray[Any]]:
    """Return arrays of a map from byte `at` on."""
    arrays = []
    for dtype, size in parts:
        arrays.append(np.frombuffer(mapped, dtype, count=size, offset=at))
        at += arrays[-1].nbytes
    return arrays
