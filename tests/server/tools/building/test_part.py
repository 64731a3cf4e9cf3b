"""One part of a build: no token id becomes another one, or nothing is left."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from corpus_server.errors import UnreadableCorpus
from corpus_server.tools.building import part
from corpus_server.tools.building.inputs import find_inputs
from corpus_server.tools.building.job import BuildOptions
from corpus_server.tools.building.part import build_part, part_path
from corpus_server.tools.building.sources import plan_parts


def build(folder: Path, options: BuildOptions, *rows: object) -> list[int]:
    """Build the one part of a file of JSON lines; return its tokens."""
    source = folder / "a.jsonl"
    source.write_text("".join(f"{json.dumps({'it': row})}\n" for row in rows))
    (whole,) = plan_parts(find_inputs([str(source)]).inputs)
    parts = folder / "parts"
    parts.mkdir()
    try:
        build_part(options, whole, parts)
    except BaseException:
        assert list(parts.iterdir()) == []
        raise
    return np.fromfile(part_path(parts, 0, "train.tokens"), options.part_dtype).tolist()


@pytest.mark.parametrize(
    ("vocab_size", "wrong", "limit"),
    [(200, 200, 200), (200, -1, 200), (None, 2**32, 2**32), (None, -1, 2**32)],
)
def test_ids_that_no_token_has_are_refused_with_their_place(
    tmp_path: Path, vocab_size: int | None, wrong: int, limit: int
) -> None:
    options = BuildOptions(tokenizer=None, eot=0, vocab_size=vocab_size, column="it")
    said = rf"a\.jsonl: line 2: token id {wrong} is outside {re.escape(f'[0, {limit})')}"
    with pytest.raises(UnreadableCorpus, match=said):
        build(tmp_path, options, [1, limit - 1], [3, wrong, 5])


@pytest.mark.parametrize("largest", [255, 256])
def test_a_tokenizer_that_exceeds_its_vocabulary_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    """In the smaller type of its vocabulary, the id would become another one."""

    def encode_batch(texts: list[str]) -> list[np.ndarray]:
        return [np.array([7, largest], np.uint32) for _ in texts]

    monkeypatch.setattr(
        part, "_tokenizer", lambda _: SimpleNamespace(encode_batch=encode_batch, dropped=lambda _: "")
    )
    options = BuildOptions(tokenizer="bytes", text_field="it", eot=0, vocab_size=256)
    if largest < 256:
        assert build(tmp_path, options, "text") == [7, largest, 0]
        return
    with pytest.raises(RuntimeError, match="gave id 256, beyond its vocabulary"):
        build(tmp_path, options, "text")


def test_a_long_text_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a megabyte may hold a gigabyte of text; it is one document."""
    monkeypatch.setattr("corpus_server.tools.building.kinds.text.PIECE_CHARS", 1 << 16)
    monkeypatch.setattr("corpus_server.tools.building.kinds.text._READ_BYTES", 1 << 16)
    num_bytes = 1 << 25
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"0123456\n" * (num_bytes // 8)))
    (tmp_path / "b.txt").write_text("b")
    (whole,) = plan_parts(find_inputs([str(tmp_path)]).inputs)
    (tmp_path / "parts").mkdir()
    tracemalloc.start()
    try:
        result = build_part(BuildOptions(tokenizer="bytes", eot=0, vocab_size=256), whole, tmp_path / "parts")
        assert tracemalloc.get_traced_memory()[1] < num_bytes / 2
    finally:
        tracemalloc.stop()
    lengths = np.fromfile(part_path(tmp_path / "parts", 0, "train.lengths"), "<u8").tolist()
    assert (result.num_tokens, lengths) == (num_bytes + 3, [num_bytes + 1, 2])
