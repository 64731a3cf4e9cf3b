"""datatrove's `X.ds`: headerless tokens, with `X.ds.index` and `X.ds.metadata` beside them.

Layout (datatrove `pipeline/tokens/tokenizer.py`), little-endian:

    X.ds            tokens, <u2 or <u4
    X.ds.index      <u8 ends[num_documents], cumulative, in tokens
    X.ds.metadata   text: `tokenizer|token size`, then the number of tokens, then the same for people
    X.ds.loss       one byte per token, 0 where training ignores it; not served
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Final

from corpus_server.corpus.files import OpenFile, TokenFile, unreadable
from corpus_server.corpus.formats.ends import CumulativeEnds
from corpus_server.corpus.formats.layout import (
    ACCEPTED_DTYPES,
    COPY_AGAIN,
    TOKEN_DTYPES,
    Format,
    Run,
    ShardLayout,
    TokenDtype,
)

_DTYPES: Final = {"2": TOKEN_DTYPES["uint16"], "4": TOKEN_DTYPES["uint32"]}  # token size -> dtype
_END_BYTES: Final = 8
_MAX_METADATA_BYTES: Final = 64 << 10


def _read(file: TokenFile, dtype: TokenDtype | None, in_folder: bool) -> ShardLayout | None:
    if file.path.suffix != ".ds":
        return None
    metadata = file.path.with_name(file.path.name + ".metadata")
    index = file.path.with_name(file.path.name + ".index")
    with ExitStack() as on_error:
        ends = on_error.enter_context(OpenFile(index)) if index.exists() else None
        last = _last_end(ends) if ends is not None else None
        found, reason = None, "named .ds"
        if metadata.exists():
            found, reason = _read_metadata(metadata, file), "its .ds.metadata says the token size"
        elif last:
            # An index without metadata (save_final_metadata=False) gives the token size, too.
            found, reason = _DTYPES.get(str(file.size_bytes // last)), "its .ds.index gives the token size"
        dtype = found or dtype
        if dtype is None and last:
            what = f"{file.size_bytes} bytes are no tokens of 2 or 4 bytes: {index.name} counts {last}"
            raise file.unreadable(what, COPY_AGAIN)
        if dtype is None:
            raise file.unreadable(
                f"datatrove stores uint16 or uint32 tokens, and neither {metadata.name} nor {index.name} "
                "says which",
                f"copy them too, or say the dtype ({ACCEPTED_DTYPES})",
            )
        num_tokens, rest = divmod(file.size_bytes, dtype.itemsize)
        if rest or (last is not None and last != num_tokens):
            held = "no end" if last is None else f"the end of {index.name} at token {last}"
            raise file.unreadable(
                f"{file.size_bytes} bytes of {dtype.name} tokens contradict {held}", COPY_AGAIN
            )
        documents = None
        if ends is not None:
            count = ends.size_bytes // _END_BYTES
            documents = CumulativeEnds(ends, at=0, num_documents=count, num_tokens=num_tokens)
        on_error.pop_all()
    return ShardLayout(
        format="datatrove",
        reason=reason,
        dtype=dtype,
        runs=(Run(0, num_tokens),),
        documents=documents,
    )


def _last_end(index: OpenFile) -> int:
    """Return the last of the document ends, 0 if there are none."""
    count, rest = divmod(index.size_bytes, _END_BYTES)
    if rest:
        raise index.unreadable(f"{index.size_bytes} bytes are not a whole number of ends", COPY_AGAIN)
    return int.from_bytes(index.read(index.size_bytes - _END_BYTES, _END_BYTES), "little") if count else 0


def _read_metadata(path: Path, data: TokenFile) -> TokenDtype:
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
    side_files={
        "*.ds.index": "a datatrove index",
        "*.ds.metadata": "datatrove metadata",
        "*.ds.loss": "a datatrove loss mask",
    },
)
