"""litData's chunks of tokens, as `optimize(..., item_loader=TokensLoader())` writes them.

Layout (litData `streaming/writer.py`), little-endian:

    chunk-*.bin   <u4 num_items | <u4 offsets[num_items + 1], bytes from the start of the file | items
    index.json    {"config": {"data_format": ["no_header_tensor:20"], "compression": null, ...},
                   "chunks": [{"filename": "chunk-0-0.bin", "dim": tokens, ...}, ...]}

An item is what the user's function yielded, usually one document: a flat array without header, so the tokens
of all items lie one after another and are mapped. `data_format` names the dtype by litData's own numbers.

An item may be a dict, of ids and a loss mask say. Then `data_format` has an entry for each value, `data_spec`
the names, and the sizes of all values in bytes (<u4) lie before them. `build` reads such items.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from corpus_server.corpus.files import OpenFile, unreadable
from corpus_server.corpus.formats.documents import CumulativeEnds
from corpus_server.corpus.formats.layout import (
    ACCEPTED_DTYPES,
    COPY_AGAIN,
    TOKEN_DTYPES,
    Format,
    ShardLayout,
    TokenDtype,
    build_ids,
    counted_run,
    read_header,
)
from corpus_server.user_files import parse_json, read_regular

# litData `constants.py`; torch's numbers name most types twice.
_TORCH: Final = {
    0: "float32",
    1: "float32",
    2: "float64",
    3: "float64",
    8: "float16",
    9: "float16",
    11: "uint8",
    12: "int8",
    13: "int16",
    14: "int16",
    15: "int32",
    16: "int32",
    17: "int64",
    18: "int64",
    19: "bool",
    20: "uint16",
}
_NUMPY: Final = {
    0: "int8",
    1: "int16",
    2: "int32",
    3: "int64",
    4: "uint8",
    5: "uint16",
    6: "uint32",
    7: "uint64",
    8: "float16",
    9: "float32",
    10: "float64",
    13: "bool",
}
_DTYPES: Final = {
    f"{serializer}:{number}": name
    for serializer, numbers in (("no_header_tensor", _TORCH), ("no_header_numpy", _NUMPY))
    for number, name in numbers.items()
}


class _Chunk(NamedTuple):
    dim: int | None  # tokens; None where items are not flat arrays
    chunk_size: int | None  # items


def _read(file: OpenFile, dtype: TokenDtype | None, in_folder: bool) -> ShardLayout | None:
    path = file.path.with_name("index.json")
    if not (file.path.name.startswith("chunk-") and file.path.suffix == ".bin" and path.is_file()):
        return None
    config, chunks = read_index(path)
    if file.path.name not in chunks:
        raise file.unreadable(f"is not among the chunks that {path.name} lists", "move it away")
    listed = chunks[file.path.name]
    tokens = _dtype(file, config, flat=listed.dim is not None)
    num_tokens = listed.dim or 0  # None was refused
    (num_items,) = read_header(file, "<I", "litData's header")
    header_bytes = 4 + 4 * (num_items + 1)
    read_header(file, "<I", "litData's header", num_bytes=header_bytes)
    if listed.chunk_size not in (None, num_items):
        what = f"holds {num_items:,} items, {path.name} lists {listed.chunk_size:,}"
        raise file.unreadable(what, "are the two of one run? Copy both again")
    ends = [int.from_bytes(file.read(at, 4), "little") for at in (4, header_bytes - 4)]
    if ends != [header_bytes, file.size_bytes]:
        raise file.unreadable(
            f"its items lie at bytes {ends[0]} to {ends[1]}, expected {header_bytes} to {file.size_bytes}",
            COPY_AGAIN,
        )
    return ShardLayout(
        format="litdata",
        reason=f"{path.name} beside it lists it: {config['data_format'][0]}",
        dtype=tokens,
        runs=counted_run(file, tokens, data_offset=header_bytes, num_tokens=num_tokens),
        documents=CumulativeEnds(
            file,
            at=8,  # behind the first offset, at which the first item begins
            num_documents=num_items,
            num_tokens=num_tokens,
            entry="<u4",
            origin=header_bytes,
            unit=tokens.itemsize,
        ),
    )


def dtype_name(data_format: str) -> str | None:
    """Return the dtype of values that are a flat array of numbers each, None for other values."""
    return _DTYPES.get(data_format)


def value_names(config: dict[str, Any]) -> list[str]:
    """Return the names of the values of items that are dicts; none if they are something else."""
    try:
        _, spec = parse_json(config["data_spec"])
        names = parse_json(spec["context"]) if spec["type"] == "builtins.dict" else []
        is_flat = len(names) == len(config["data_format"]) and all(isinstance(each, str) for each in names)
        return list(names) if is_flat else []
    except (KeyError, TypeError, ValueError):
        return []


def _dtype(file: OpenFile, config: dict[str, Any], *, flat: bool) -> TokenDtype:
    """Return the dtype of a chunk's tokens; refuse one whose tokens cannot be mapped."""
    remedy, formats = build_ids(file.path.parent, "tokens"), config["data_format"]
    found = dtype_name(formats[0]) if len(formats) == 1 else None
    arrays = [name for name, kind in zip(value_names(config), formats, strict=False) if dtype_name(kind)]
    reason = None
    if config.get("encryption"):
        reason, remedy = "index.json says that it is encrypted", "decrypt it first"
    elif found is None or np.dtype(found).kind not in "iu":
        reason = f"its items are {', '.join(config['data_format'])}, expected one array of token ids"
        remedy = "write the token ids alone: optimize(..., item_loader=TokensLoader())"
        if arrays:
            remedy = build_ids(file.path.parent, arrays[0])
    elif config.get("compression"):
        reason = f"index.json says compression {config['compression']}"
    elif not flat:
        reason = "written without TokensLoader, which leaves sizes between the items"
    elif found not in TOKEN_DTYPES:
        reason = f"its tokens are {found}, served are {ACCEPTED_DTYPES}"
    if found is None or reason is not None:
        raise file.unreadable(f"is a litData chunk that cannot be mapped: {reason}", remedy)
    return TOKEN_DTYPES[found]


def read_index(path: Path) -> tuple[dict[str, Any], dict[str, _Chunk]]:
    """Return the config and what is listed of each chunk."""
    try:
        status = path.stat()
        return _read_index(path, status.st_mtime_ns, status.st_size)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise unreadable(path, f"is no index of litData: {error!r:.300}", COPY_AGAIN) from error


# Cached, because each of a folder's chunks asks for the same index, which grows with their number.
@lru_cache(maxsize=4)
def _read_index(path: Path, mtime_ns: int, size_bytes: int) -> tuple[dict[str, Any], dict[str, _Chunk]]:
    index = parse_json(read_regular(path))
    config = index["config"]
    chunks = {each["filename"]: _Chunk(each["dim"], each.get("chunk_size")) for each in index["chunks"]}
    for name in _Chunk._fields:
        if wrong := [
            value for each in chunks.values() if type(value := getattr(each, name)) not in (int, type(None))
        ]:
            raise ValueError(f"a chunk's {name} is {wrong[0]!r:.100}")
    config["data_format"] = [str(each) for each in config["data_format"]]
    return config, chunks


def _listed(path: Path) -> list[tuple[str]] | None:
    try:
        index = parse_json(read_regular(path))
        return [(str(each["filename"]),) for each in index["chunks"]] if "config" in index else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # `read_index` says so for a chunk; of anything else it need not be


FORMAT: Final = Format(
    read=_read,
    list_name="index.json",
    listed=_listed,
    is_listed=lambda name: name.startswith("chunk-") and name.endswith(".bin"),
)
