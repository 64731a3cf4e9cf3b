"""The file of a view: a multiplicity for each document of a corpus, and an index of them. Little-endian.

    byte  0  b"CORPVIEW"
          8  <u8 version, 1
         16  <u8 bytes of the header, with the spaces that fill it up to a multiple of 8
         24  <u8 xxh3-64 of the header
         32  the header, JSON
             <i8 first_document[G], group_token[G + 1], group_chosen[G + 1]
             the multiplicities, in the smallest of these encodings:
               bits    one bit a document, the lowest first; for multiplicities 0 and 1
               bytes   <u1 a document
               words   <u2 a document
               runs    <i8 first document of each of R runs, then <u2 its multiplicity

A *group* is up to 256 documents of one shard, numbered from the shard's first on. Only groups with a chosen
document are listed. `group_token` and `group_chosen` are the view's tokens and documents before each.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus_server.corpus.files import Closing, OpenFile
from corpus_server.corpus.formats.documents import runs_of
from corpus_server.corpus.formats.layout import read_header
from corpus_server.corpus.publish import publishing
from corpus_server.pieces import Int64Array, expanded
from corpus_server.user_files import parse_json

GROUP: Final = 256
"""Documents of a group: the index takes 24 bytes for them."""

_GROUP_BYTES: Final = GROUP // 8 + 1  # that hold the bits of a group, wherever in a byte it begins

MAX_MULTIPLICITY: Final = 2**16 - 1

_MAGIC: Final = b"CORPVIEW"
_VERSION: Final = 1
_HEADER: Final = "<8sQQQ"
_HEADER_BYTES: Final = struct.calcsize(_HEADER)
_CHECKED_BYTES: Final = 64 << 20
"""Arrays up to this size are compared with their digest when the view is opened: 10 ms."""
_AGAIN: Final = "was the copy interrupted? Copy it again, or make it with corpus-server view create"

Multiplicities = NDArray[np.uint8 | np.uint16]


class Groups(NamedTuple):
    """The index of a view, see above."""

    first_document: Int64Array
    token: Int64Array
    chosen: Int64Array


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
    digest: str  # xxh3-128 of the arrays

    def fingerprint(self, of_corpus: str) -> str:
        """Return the view's fingerprint, of the kind of the corpus's."""
        kind, _, _ = of_corpus.partition("-")
        made_of = f"corpus-server view 1\n{of_corpus}\n{self.documents}\n{self.digest}\n"
        return f"{kind}-{hashlib.sha256(made_of.encode()).hexdigest()}"


def write_view(
    path: Path, multiplicities: Multiplicities, groups: Groups, *, header: Mapping[str, Any]
) -> ViewHeader:
    """Publish a view; raises OSError. `header` has the fields that do not follow from the arrays."""
    encoding, entries, arrays = _encoded(multiplicities)
    arrays = [*groups, *arrays]
    digest = xxhash.xxh3_128()
    for each in arrays:
        digest.update(each.data)
    made = ViewHeader(
        **header,
        num_documents=multiplicities.size,
        num_chosen=int(groups.chosen[-1]),
        num_tokens=int(groups.token[-1]),
        num_groups=groups.first_document.size,
        encoding=encoding,
        num_entries=entries,
        digest=f"xxh3-{digest.hexdigest()}",
    )
    text = json.dumps(asdict(made), sort_keys=True).encode()
    text += b" " * (-len(text) % 8)
    with publishing(path) as file:
        file.write(struct.pack(_HEADER, _MAGIC, _VERSION, len(text), xxhash.xxh3_64_intdigest(text)) + text)
        for each in arrays:
            file.write(each.data)
    return made


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
    """An open view, mapped; checked in O(1) but for the digest of arrays up to 64 MiB.

    Raises:
        UnreadableCorpus: it is cut, changed or none.

    Attributes:
        header: see `ViewHeader`.
        groups: see `Groups`.
    """

    def __init__(self, path: Path) -> None:
        with ExitStack() as on_error:
            self.file = file = on_error.enter_context(OpenFile(path))
            if file.head(len(_MAGIC)) != _MAGIC:
                raise file.unreadable("is no view: it does not begin as one", "name a file of `view create`")
            _, version, size, checksum = read_header(file, _HEADER, "the header of a view", remedy=_AGAIN)
            if version != _VERSION:
                raise file.unreadable(f"view version {version} is unknown (known: {_VERSION})", _AGAIN)
            if size > file.size_bytes - _HEADER_BYTES:
                raise file.unreadable(f"{file.size_bytes} bytes end inside its header", _AGAIN)
            text = file.read(_HEADER_BYTES, size)
            if xxhash.xxh3_64_intdigest(text) != checksum:
                raise file.unreadable("its header is damaged", _AGAIN)
            self.header = ViewHeader(**parse_json(text))
            self._at = _HEADER_BYTES + size
            count = self.header.num_groups
            parts = [("<i8", count), ("<i8", count + 1), ("<i8", count + 1)]
            number = self.header.num_entries
            parts += {
                "bits": [("<u1", number)],
                "bytes": [("<u1", number)],
                "words": [("<u2", number)],
                "runs": [("<i8", number), ("<u2", number)],
            }[self.header.encoding]
            expected = self._at + sum(np.dtype(dtype).itemsize * size for dtype, size in parts)
            if file.size_bytes != expected:
                raise file.unreadable(f"holds {file.size_bytes} bytes, its header says {expected}", _AGAIN)
            mapped, at = file.map(), self._at
            arrays = []
            for dtype, size in parts:
                arrays.append(np.frombuffer(mapped, dtype, count=size, offset=at))
                at += arrays[-1].nbytes
            self.groups, self._arrays = Groups(*arrays[:3]), arrays[3:]
            if file.size_bytes <= _CHECKED_BYTES and (problem := self.find_problem()) is not None:
                raise file.unreadable(problem, _AGAIN)
            on_error.pop_all()

    def find_problem(self) -> str | None:
        """Compare the arrays with their digest; return what is wrong, or None."""
        digest = xxhash.xxh3_128()
        for at in range(self._at, self.file.size_bytes, 1 << 20):
            digest.update(self.file.read(at, min(1 << 20, self.file.size_bytes - at)))
        if f"xxh3-{digest.hexdigest()}" == self.header.digest:
            return None
        return "its arrays differ from the ones written"

    def multiplicities(self, first: Int64Array, stops: Int64Array) -> Multiplicities:
        """Return those of `GROUP` documents of the corpus from each of `first` on: `(k, GROUP)`.

        Of documents from `stops` on, which are above `first`, they are 0.
        """
        arrays, spare = self._arrays, 8 * (_GROUP_BYTES - GROUP // 8) if self.header.encoding == "bits" else 0
        is_whole = first + GROUP <= np.minimum(stops, self.header.num_documents - spare)
        found = self._whole_groups(first[is_whole], *arrays)
        if is_whole.all():
            return found
        every = np.zeros((first.size, GROUP), dtype=found.dtype)
        every[is_whole] = found
        for number in np.flatnonzero(~is_whole).tolist():
            start = int(first[number])
            its = self.decoded(start, min(int(stops[number]), start + GROUP))
            every[number, : its.size] = its
        return every

    def _whole_groups(
        self, first: Int64Array, values: NDArray[Any], times: NDArray[np.uint16] | None = None
    ) -> Multiplicities:
        if times is not None:
            low, high = (values.searchsorted(each, side="right") for each in (first, first + GROUP - 1))
            which, runs = expanded(low - 1, high - low + 1)
            begins = GROUP * which + np.maximum(values[runs] - first[which], 0)
            return times[runs].repeat(np.diff(begins, append=GROUP * first.size)).reshape(-1, GROUP)
        if self.header.encoding != "bits":
            return runs_of(values, first, GROUP)
        bits = np.unpackbits(runs_of(values, first >> 3, _GROUP_BYTES), axis=1, bitorder="little")
        found = np.empty((first.size, GROUP), dtype=np.uint8)
        for shift in np.unique(first & 7).tolist():  # one in each shard
            its = (first & 7) == shift
            found[its] = bits[its, shift : shift + GROUP]
        return found

    def decoded(self, start: int, stop: int) -> Multiplicities:
        """Return the multiplicities of documents [start, stop) of the corpus."""
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
