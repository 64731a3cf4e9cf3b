"""Samples of MDS shards and items of litData chunks that cannot be served as they lie.

Both begin with `<u4 count | <u4 offsets[count + 1]`, offsets from the start of the file. See
`corpus/formats/mds.py` and `corpus/formats/litdata.py`, which serve the ones that can be mapped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.formats.litdata import dtype_name, read_index, value_names
from corpus_server.corpus.formats.mds import Column, check_samples, read_columns
from corpus_server.tools.building.job import BuildOptions, Slice
from corpus_server.tools.building.kinds.kind import Document, Kind, field_of, no_field, opened
from corpus_server.tools.building.kinds.masked import mask_fields, with_masks

_U4: Final = np.dtype("<u4")
# mosaicml-streaming `base/format/mds/encodings.py`: numbers of the types of values and of shapes
_VALUES: Final = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 32: "u4", 33: "i4", 64: "u8", 65: "i8"}
_ARRAYS: Final = ("ndarray", "bytes")  # encodings


def _read_mds(piece: Slice, options: BuildOptions) -> Iterator[Document]:
    with opened(piece.path) as file:
        data = file.read()
    offsets = _offsets(data)
    check_samples(Path(piece.path), len(offsets) - 1)
    columns = read_columns(data[4 + offsets.nbytes : offsets[0]])
    wanted, sizes = _wanted(columns, piece, options), [each.size for each in columns]
    varying = sizes.count(None)
    for sample, (start, stop) in enumerate(pairwise(offsets.tolist())):
        # The sizes of the columns of varying size come first.
        counts = iter(np.frombuffer(data, _U4, count=varying, offset=start).tolist())
        lengths = (next(counts) if size is None else size for size in sizes)
        begins = list(accumulate(lengths, initial=start + _U4.itemsize * varying))
        if begins[-1] > stop:
            raise ValueError(f"a sample of {stop - start} bytes is too short for its columns")
        content, *masks = (
            _mds_value(data[begins[number] : begins[number + 1]], columns[number]) for number in wanted
        )
        if not isinstance(content, str) and content.dtype.kind not in "iu":
            raise ValueError(f"token ids are integers, not {content.dtype}")
        document = Document(piece.path, "sample", sample, content)
        named = {columns[number].name: [mask] for number, mask in zip(wanted[1:], masks, strict=True)}
        yield from with_masks([document], named, options) if named else (document,)


def _check_mds(piece: Slice, options: BuildOptions) -> None:
    """Read the head alone."""
    with opened(piece.path) as file:
        head = file.read(_U4.itemsize)
        offsets = file.read(_U4.itemsize * (1 + int.from_bytes(head, "little")))
        check_samples(Path(piece.path), int.from_bytes(head, "little"))
        begin = int.from_bytes(offsets[: _U4.itemsize], "little")
        _wanted(read_columns(file.read(max(0, begin - len(head) - len(offsets)))), piece, options)


def _wanted(columns: Sequence[Column], piece: Slice, options: BuildOptions) -> list[int]:
    """Return which column holds the documents, and those of their masks behind it.

    A column of another kind than the options say is an error.
    """
    path, name, names = Path(piece.path), field_of(piece, options), [each.name for each in columns]
    named = [name, *(options.mask if options.has_masks else ())]
    if missing := [each for each in named if each not in names]:
        raise unreadable(path, *no_field(missing[0], names, options))
    encoding = columns[names.index(name)].encoding
    if (encoding == "str") != (options.column is None):
        wanted = "text" if options.column is None else "token ids"
        raise unreadable(path, f"its column {name!r} is {encoding}, expected {wanted}")
    arrays = [each.name for each in columns if each.encoding.startswith(_ARRAYS)]
    if wrong := [each for each in named[1:] if each not in arrays]:
        encoding = columns[names.index(wrong[0])].encoding
        raise unreadable(path, f"its column {wrong[0]!r} is {encoding}, expected an array of numbers")
    return [names.index(each) for each in (name, *mask_fields(arrays, options))]


def _mds_value(value: bytes, column: Column) -> str | np.ndarray[Any, np.dtype[Any]]:
    try:
        return _decoded(value, column.encoding)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"its column {column.name!r} is no {column.encoding}: {error!r}") from error


def _decoded(value: bytes, encoding: str) -> str | np.ndarray[Any, np.dtype[Any]]:
    kind, *arguments = encoding.split(":")
    if kind == "str":
        return value.decode()
    if kind == "bytes":
        return np.frombuffer(value, "<i8")  # what LLM Foundry keeps under this encoding
    if kind != "ndarray":
        raise ValueError(f"its column is {encoding}, expected str, bytes or ndarray")
    dtype, at = np.dtype(arguments[0]) if arguments else None, 0
    if dtype is None:
        dtype, at = np.dtype(f"<{_VALUES[value[0]]}"), 1
    if len(arguments) < 2:  # the number of axes and the type of their lengths share a byte
        at += 1 + (value[at] >> 2) * 2 ** (value[at] % 4)
    return np.frombuffer(value, dtype.newbyteorder("<"), offset=at)


class _Layout(NamedTuple):
    """How the items of a chunk are read: formats of their values, and which of these are ids and masks.

    is_flat: the items are the ids alone, without sizes before them.
    """

    formats: Sequence[str]
    names: Sequence[str]
    wanted: Sequence[int]
    is_flat: bool


def _litdata_layout(piece: Slice, options: BuildOptions) -> _Layout:
    """Return how the items of a chunk are read, after checking that they can be."""
    path = Path(piece.path)
    index = path.with_name("index.json")
    config, chunks = read_index(index) if index.exists() else ({}, {})
    if path.name not in chunks:
        raise unreadable(path, "is no chunk that an index.json of litData lists", "serve it as it is")
    if options.column is None:
        raise unreadable(path, "holds token ids", "say --column tokens")
    formats, names = config["data_format"], value_names(config)
    arrays = [name for name, kind in zip(names, formats, strict=False) if dtype_name(kind)]
    named = options.mask if options.has_masks else ()
    if len(formats) == 1 and dtype_name(formats[0]) and not named:
        wanted = [0]
    elif names and (missing := [each for each in (options.column, *named) if each not in arrays]):
        if missing[0] not in names:
            raise unreadable(path, *no_field(missing[0], names, options))
        kind = formats[names.index(missing[0])]
        raise unreadable(path, f"its {missing[0]!r} is {kind}, expected a flat array of numbers")
    elif names:
        wanted = [names.index(each) for each in (options.column, *mask_fields(arrays, options))]
    else:
        what = f"its items are {', '.join(formats)}, expected an array of token ids or a dict with some"
        raise unreadable(path, what, "write JSON lines or Parquet, which may have masks beside the ids")
    if config.get("encryption"):
        raise unreadable(path, "is encrypted, as index.json says", "decrypt it first")
    if (level := config.get("compression_level")) in ("sample", "batch"):
        what = f"its items are compressed (compression_level {level!r}), and not the chunk as a whole"
        raise unreadable(path, what, 'write it anew with compression_level="chunk", or without compression')
    return _Layout(formats, names or ["tokens"], wanted, chunks[path.name].dim is not None)


def _read_litdata(piece: Slice, options: BuildOptions) -> Iterator[Document]:
    layout = _litdata_layout(piece, options)
    with opened(piece.path) as file:
        data = file.read()
    count = len(layout.formats)
    for number, (start, stop) in enumerate(pairwise(_offsets(data).tolist())):
        sizes = [stop - start] if layout.is_flat else np.frombuffer(data, _U4, count, start).tolist()
        begins = list(accumulate(sizes, initial=start if layout.is_flat else start + _U4.itemsize * count))
        if begins[-1] != stop:
            raise ValueError(f"the values of item {number} end at byte {begins[-1]}, the item at byte {stop}")
        ids, *masks = (
            np.frombuffer(data[begins[at] : begins[at + 1]], dtype_name(layout.formats[at]))
            for at in layout.wanted
        )
        if ids.dtype.kind not in "iu":
            raise ValueError(f"token ids are integers, not {ids.dtype}")
        document = Document(piece.path, "item", number, ids)
        names = (layout.names[at] for at in layout.wanted[1:])
        named = {name: [mask] for name, mask in zip(names, masks, strict=True)}
        yield from with_masks([document], named, options) if named else (document,)


def _offsets(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    try:
        (count,) = struct.unpack_from("<I", data)
        offsets = np.frombuffer(data, _U4, count=count + 1, offset=4)
    except struct.error as error:
        raise ValueError(f"{len(data)} bytes end inside the header") from error
    if (
        offsets[0] < 4 + offsets.nbytes
        or offsets[-1] != len(data)
        or (np.diff(offsets.astype("i8")) < 0).any()
    ):
        raise ValueError(f"its samples end at byte {offsets[-1]}, the file at byte {len(data)}")
    return offsets


MDS: Final = Kind(_read_mds, _check_mds, has_masks=True)
LITDATA: Final = Kind(_read_litdata, _litdata_layout, has_masks=True)
