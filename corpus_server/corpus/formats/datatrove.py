"""datatrove's `X.ds`: headerless tokens, with `X.ds.index` and `X.ds.metadata` beside them.

Layout (datatrove `pipeline/tokens/tokenizer.py`), little-endian:

    X.ds            tokens, <u2 or <u4
    X.ds.index      <u8 ends[num_documents], cumulative, in tokens
    X.ds.metadata   text: `tokenizer|token size`, then the number of tokens, then the same for people
    X.ds.loss       a loss mask: one byte per token, 0 where training ignores it
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from corpus_server.corpus.files import OpenFile, unreadable
from corpus_server.corpus.formats.documents import CumulativeEnds
from corpus_server.corpus.formats.layout import (
    ACCEPTED_DTYPES,
    COPY_AGAIN,
    TOKEN_DTYPES,
    Format,
    Run,
    ShardLayout,
    TokenDtype,
    whole_number,
)

_DTYPES: Final = {"2": TOKEN_DTYPES["uint16"], "4": TOKEN_DTYPES["uint32"]}  # token size -> dtype
_END_BYTES: Final = 8
_MAX_METADATA_BYTES: Final = 64 << 10


def _read(file: OpenFile, dtype: TokenDtype | None, in_folder: bool) -> ShardLayout | None:
    if file.path.suffix != ".ds":
        return None
    metadata, index = (file.path.with_name(f"{file.path.name}.{each}") for each in ("metadata", "index"))
    with ExitStack() as on_error:
        ends, num_ends, last, reason = None, 0, 0, "named .ds"
        if index.exists():
            ends = on_error.enter_context(OpenFile(index))
            if num_ends := whole_number(ends, _END_BYTES, "ends"):
                last = int.from_bytes(ends.read(ends.size_bytes - _END_BYTES, _END_BYTES), "little")
        if metadata.exists():
            dtype, reason = _read_metadata(metadata, file), "its .ds.metadata says the token size"
        elif last:
            # An index without metadata (save_final_metadata=False) gives the token size, too.
            found, reason = _DTYPES.get(str(file.size_bytes // last)), "its .ds.index gives the token size"
            if (dtype := found or dtype) is None:
                what = f"{file.size_bytes} bytes are no tokens of 2 or 4 bytes: {index.name} counts {last}"
                raise file.unreadable(what, COPY_AGAIN)
        if dtype is None:
            raise file.unreadable(
                f"datatrove stores uint16 or uint32 tokens, and neither {metadata.name} nor {index.name} "
                "says which",
                f"copy them too, or say the dtype ({ACCEPTED_DTYPES})",
            )
        num_tokens = whole_number(file, dtype.itemsize, f"{dtype.name} tokens")
        if ends is not None and last != num_tokens:
            what = f"{num_tokens} {dtype.name} tokens contradict the end of {index.name} at token {last}"
            raise file.unreadable(what, COPY_AGAIN)
        on_error.pop_all()
    layout = ShardLayout(format="datatrove", reason=reason, dtype=dtype, runs=(Run(0, num_tokens),))
    if ends is None:
        return layout
    documents = CumulativeEnds(ends, at=0, num_documents=num_ends, num_tokens=num_tokens)
    return replace(layout, documents=documents)


def _read_metadata(path: Path, data: OpenFile) -> TokenDtype:
    """Return the dtype that the metadata says; refuse it if it counts other tokens than the file holds."""
    with OpenFile(path) as file:
        lines = file.head(_MAX_METADATA_BYTES).decode("utf-8", "replace").splitlines()
    size = lines[0].rpartition("|")[2] if lines else ""
    dtype = _DTYPES.get(size)
    if dtype is None:
        raise unreadable(
            path,
            f"expected a first line 'tokenizer|token size' with size 2 or 4, got {lines[:1]!r:.200}",
            "copy it again, or move it away and say the dtype",
        )
    counted = lines[1][:20] if len(lines) > 1 else ""  # a number of 4,301 digits would be an error
    if counted.isdecimal() and int(counted) * dtype.itemsize != data.size_bytes:
        raise unreadable(
            path,
            f"says {counted} tokens of {size} bytes, but {data.path.name} holds {data.size_bytes} bytes",
            COPY_AGAIN,
        )
    return dtype


FORMAT: Final = Format(
    read=_read,
    side_files={"*.ds.index": "a datatrove index", "*.ds.metadata": "datatrove metadata"},
    loss_masks={"*.ds.loss": "a datatrove loss mask"},
    mask_names=lambda name: [f"{name}.loss"] if name.endswith(".ds") else [],
)
