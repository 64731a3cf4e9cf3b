"""OLMo's and Dolma's `part-*.npy`: a raw dump under a name that promises an NPY file.

Beside it lies `part-*.csv.gz` with one row `start,end,id,source,place` per document, in tokens (Dolma
`tokenizer/memmap_writer.py`). It must be decompressed whole, so `corpus-server index` copies its ends
to the sidecar, once; opening does not read it.

A loss mask is a dump of one byte a token, too, 1 where training counts the token. OLMo-core takes lists of
both; those that write them name them alike:

    token_ids_part_0000.npy    labels_mask_part_0000.npy    open-instruct `convert_sft_data_for_olmocore.py`
    input_ids.npy              label_mask.npy               OLMo `prepare_tulu_data.py`
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from corpus_server.corpus.files import OpenFile, unreadable
from corpus_server.corpus.formats.documents import CHUNK_ENDS
from corpus_server.corpus.formats.layout import COPY_AGAIN, Ends, Format, ShardLayout, TokenDtype
from corpus_server.corpus.formats.raw import headerless_layout
from corpus_server.user_files import open_regular

_IDS: Final = ("token_ids", "input_ids")  # words in the names of token files ...
_MASKS: Final = ("labels_mask", "label_mask")  # ... and those in their place in the names of loss masks


def _read(file: OpenFile, dtype: TokenDtype | None, in_folder: bool) -> ShardLayout | None:
    if file.path.suffix != ".npy":
        return None
    layout = headerless_layout(
        file, dtype, in_folder, name="olmo", reason="named .npy, without the NPY header"
    )
    rows = file.path.with_suffix(".csv.gz")
    if not rows.exists():
        return layout
    return replace(layout, listed_ends=partial(_read_ends, rows, layout.num_tokens))


def _read_ends(path: Path, num_tokens: int) -> Iterator[Ends]:
    """Yield the document ends in pieces; refuse rows that do not cover the tokens one after another."""
    previous = 0
    try:
        with open_regular(path) as file, gzip.open(file, "rt", encoding="utf-8", newline="") as text:
            rows = csv.reader(text)
            while piece := [(int(row[0]), int(row[1])) for row in islice(rows, CHUNK_ENDS)]:
                starts, ends = np.array(piece, np.int64).T
                if starts[0] != previous or (starts[1:] != ends[:-1]).any() or (starts > ends).any():
                    raise ValueError(f"a document behind token {previous} does not begin where another ends")
                previous = int(ends[-1])
                yield ends
        if previous != num_tokens:
            raise ValueError(f"its last document ends at token {previous}, the shard holds {num_tokens}")
    except (OSError, EOFError, zlib.error, ValueError, OverflowError, IndexError, csv.Error) as error:
        raise unreadable(path, f"its rows 'start,end,...' cannot be used: {error}", COPY_AGAIN) from error


def _mask_names(name: str) -> list[str]:
    if not name.endswith(".npy"):
        return []
    return [name.replace(ids, mask) for ids in _IDS if ids in name for mask in _MASKS]


FORMAT: Final = Format(
    read=_read,
    side_files={"*.csv.gz": "a table of document boundaries (OLMo), or another compressed CSV file"},
    loss_masks=dict.fromkeys((f"*{mask}*.npy" for mask in _MASKS), "a loss mask of OLMo"),
    mask_names=_mask_names,
)
