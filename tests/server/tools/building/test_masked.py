"""Loss masks that `build` makes of the fields beside token ids: padding is no text, and -100 no target."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from corpus_server.corpus.verify import verify
from corpus_server.errors import InvalidParameter, UnreadableCorpus
from corpus_server.tools.building.manifest import read_manifest, spec_of
from corpus_server.tools.building.merge import merge
from tests.corpora import open_corpus
from tests.server.tools.building.sources import build_here
from tests.serving import RunningServer, run_here

PAD, END, LENGTH = 0, 2, 8
NUMBERS = {"<i4": 2, "<f4": 9, "?": 13}  # of NumPy's types in litData
DOCUMENTS = [[5, 6, 7, END], [8, 9, END], [10, 11, 12, 13, 14, END]]
PADDED = [each + [PAD] * (LENGTH - len(each)) for each in DOCUMENTS]
ATTENTION = [[1] * len(each) + [0] * (LENGTH - len(each)) for each in DOCUMENTS]
LABELS = [[-100] * 2 + each[2:] + [-100] * (LENGTH - len(each)) for each in DOCUMENTS]
TARGETS = [[0, 0, 1, 1], [0, 0, 1], [0, 0, 1, 1, 1, 1]]


def write_parquet(folder: Path, **columns: Sequence[Any]) -> Path:
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return folder / "a.parquet"


def write_lines(folder: Path, **columns: Sequence[Any]) -> Path:
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder / "a.jsonl"


def write_feather(folder: Path, **columns: Sequence[Any]) -> Path:
    path = folder / "a.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, pa.table(columns).schema) as writer:
        writer.write_table(pa.table(columns), max_chunksize=2)
    return path


def write_mds(folder: Path, **columns: Sequence[Any]) -> Path:
    """Write a shard of MDS by its layout, as mosaicml-streaming writes arrays of any length."""
    arrays = {name: [np.array([] if row is None else row) for row in rows] for name, rows in columns.items()}
    kinds = {name: {"i": "<i4", "b": "u1", "f": "<f4"}[rows[-1].dtype.kind] for name, rows in arrays.items()}
    config = {
        "column_names": list(columns),
        "column_encodings": [f"ndarray:{np.dtype(kind).name}" for kind in kinds.values()],
        "column_sizes": [None] * len(columns),
    }
    samples = []
    for number in range(len(next(iter(arrays.values())))):
        # The number of axes and the type of their lengths share a byte, then come the lengths.
        values = [
            bytes([1 << 2 | 2])
            + struct.pack("<I", rows[number].size)
            + rows[number].astype(kinds[name]).tobytes()
            for name, rows in arrays.items()
        ]
        samples.append(struct.pack(f"<{len(values)}I", *map(len, values)) + b"".join(values))
    head = json.dumps(config).encode()
    offsets = 8 + 4 * len(samples) + len(head) + np.cumsum([0, *map(len, samples)])
    path = folder / "shard.00000.mds"
    path.write_bytes(
        struct.pack("<I", len(samples)) + offsets.astype("<u4").tobytes() + head + b"".join(samples)
    )
    return path


def write_litdata(folder: Path, **columns: Sequence[Any]) -> Path:
    """Write a chunk of litData by its layout, of items that are dicts of arrays and a text."""
    arrays = {name: [np.array([] if row is None else row) for row in rows] for name, rows in columns.items()}
    kinds = {name: {"i": "<i4", "b": "?", "f": "<f4"}[rows[-1].dtype.kind] for name, rows in arrays.items()}
    names = ["id", *columns]
    config = {
        "compression": None,
        "data_format": ["str", *(f"no_header_numpy:{NUMBERS[kind]}" for kind in kinds.values())],
        "data_spec": json.dumps([1, {"type": "builtins.dict", "context": json.dumps(names)}]),
    }
    items = []
    for number in range(len(next(iter(arrays.values())))):
        rows = (rows[number].astype(kinds[name]).tobytes() for name, rows in arrays.items())
        values = [f"item {number}".encode(), *rows]
        items.append(struct.pack(f"<{len(values)}I", *map(len, values)) + b"".join(values))
    offsets = 8 + 4 * len(items) + np.cumsum([0, *map(len, items)])
    path = folder / "chunk-0-0.bin"
    path.write_bytes(struct.pack("<I", len(items)) + offsets.astype("<u4").tobytes() + b"".join(items))
    chunk = {"filename": path.name, "dim": None, "chunk_size": len(items), "chunk_bytes": int(offsets[-1])}
    (folder / "index.json").write_text(json.dumps({"config": config, "chunks": [chunk]}))
    return path


@pytest.fixture(params=[write_parquet, write_lines, write_feather, write_mds, write_litdata])
def write(request: pytest.FixtureRequest) -> Callable[..., Path]:
    return request.param


def built(source: Path, **options: Any) -> tuple[list[int], list[int] | None]:
    """Return the tokens of a corpus that is built of a source, and its loss mask."""
    out = source.parent / f"out-{len(list(source.parent.iterdir()))}"
    build_here([source], out, column="input_ids", eot=END, **{"rows": "documents", **options})
    assert verify(spec_of(out)).ok
    with open_corpus(out) as corpus:
        (shard,) = corpus.shards
        mask = None if shard.mask is None else (shard.mask.tokens * 1).tolist()
        manifest = read_manifest(out)
        assert manifest.num_targets == (None if mask is None else np.count_nonzero(mask))
        assert manifest.loss_mask_dtype == shard.describe().get("loss_mask", {}).get("dtype")
        return shard.tokens.tolist(), mask


def joined(rows: Sequence[Sequence[int]]) -> list[int]:
    return [each for row in rows for each in row]


def test_padding_is_left_out_and_labels_become_the_loss_mask(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    source = write(tmp_path, input_ids=PADDED, attention_mask=ATTENTION, labels=LABELS)
    both = built(source, mask=("labels", "attention_mask"))
    assert both == (joined(DOCUMENTS), joined(TARGETS))
    tokens, mask = built(source, mask=("labels",))  # covers the padding, too, which stays
    assert tokens == joined([[*row, END] for row in PADDED])
    assert mask == joined([[int(label != -100) for label in row] + [0] for row in LABELS])
    assert built(source, mask=("none",)) == (tokens, None)
    with pytest.raises(
        UnreadableCorpus, match=r"'labels' says that token 0 is no target.*--mask attention_mask,labels"
    ):
        built(source, mask=("attention_mask",))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"attention_mask": ATTENTION},
            "'attention_mask' says that token 4 is no target of training; say --mask att",
        ),
        (
            {"labels": LABELS},
            "'labels' says that token 0 is no target of training; say --mask labels to make a loss",
        ),
        ({"completion_mask": ATTENTION}, "'completion_mask' says that token 4 is no target"),
    ],
)
def test_padding_and_masked_labels_are_not_trained_on_in_silence(
    tmp_path: Path, write: Callable[..., Path], fields: dict[str, Any], message: str
) -> None:
    source = write(tmp_path, input_ids=PADDED, **fields)
    with pytest.raises(UnreadableCorpus, match=message):
        built(source)
    whole = {name: [[1] * LENGTH if name != "labels" else row for row in PADDED] for name in fields}
    assert built(write(tmp_path, input_ids=PADDED, **whole)) == (
        joined([[*row, END] for row in PADDED]),
        None,
    )


@pytest.mark.parametrize("kind", [int, bool, float])
def test_a_field_of_zeros_and_ones(tmp_path: Path, write: Callable[..., Path], kind: type) -> None:
    weights = [[kind(number % 2) for number in range(len(row))] for row in DOCUMENTS]
    tokens, mask = built(write(tmp_path, input_ids=DOCUMENTS, weights=weights), mask=("weights",))
    assert (tokens, mask) == (joined(DOCUMENTS), joined([[int(each) for each in row] for row in weights]))


def test_a_field_of_weights_is_kept_as_float16(tmp_path: Path, write: Callable[..., Path]) -> None:
    weights = [[0.1, 0.0, 1.0, 0.5], [65504.0, 1e-9, 2.0], [0.25] * 6]
    source = write(tmp_path, input_ids=DOCUMENTS, weights=weights, labels=[[5, -100, 7, 2], *DOCUMENTS[1:]])
    tokens, mask = built(source, mask=("weights", "labels"))
    assert (tokens, mask) == (joined(DOCUMENTS), np.array(joined(weights), np.float16).tolist())
    source = write(
        tmp_path, input_ids=DOCUMENTS, weights=[[0.1] * 4, *weights[1:]], labels=[[-100] * 4, *DOCUMENTS[1:]]
    )
    assert (
        built(source, mask=("labels", "weights"))[1]
        == np.array(joined([[0] * 4, *weights[1:]]), np.float16).tolist()
    )
    whole = write(tmp_path, input_ids=DOCUMENTS, weights=[[1.0] * len(row) for row in DOCUMENTS])
    assert built(whole, mask=("weights",))[1] == [1] * len(tokens)  # a byte each


def test_weights_are_not_lost_in_silence(tmp_path: Path, write: Callable[..., Path]) -> None:
    for name in ("weights", "loss_weights", "loss_mask"):
        source = write(tmp_path, input_ids=[[5, 6, END]], **{name: [[1.0, 0.5, 1.0]]})
        with pytest.raises(
            UnreadableCorpus, match=f"'{name}' says that token 1 has the weight 0.5; say --mask {name}"
        ):
            built(source)
        assert built(source, mask=("none",)) == ([5, 6, END], None)


def test_packed_rows_keep_their_weights_and_the_build_says_what_it_keeps(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(3, 50, (40, 16))
    ids[:, 11] = END
    weights = np.random.default_rng(1).random((40, 16)).astype(np.float32)
    weights[:20] = 0.5
    source = write_parquet(tmp_path, input_ids=ids.tolist(), weights=weights.tolist())
    options = ("--column", "input_ids", "--eot", END, "--rows", "packed", "--mask", "weights")
    said = run_here("build", source, *options, "--shard-tokens", 200, "--out", tmp_path / "out")
    assert said.returncode == 0, said.stderr
    kept = weights.astype(np.float16)
    assert f"loss masks of weights (float16): {np.count_nonzero(kept)} targets" in said.stdout
    assert "rounded" in said.stdout
    assert f"weights of {np.count_nonzero(kept != weights)} tokens, to float16" in said.stdout
    with open_corpus(tmp_path / "out") as corpus:
        masks = [shard.mask for shard in corpus.shards if shard.mask is not None]
        assert len(masks) == len(corpus.shards) > 2
        assert np.concatenate([mask.tokens for mask in masks]).tolist() == kept.ravel().tolist()
    said = run_here("inspect", tmp_path / "out")
    assert f"for {len(masks)} of {len(masks)} shards ({len(masks)} of weights, float16)" in said.stdout
    assert verify(spec_of(tmp_path / "out")).ok


def test_the_end_of_text_is_learnt_with_the_last_token(tmp_path: Path, write: Callable[..., Path]) -> None:
    rows, weights = [[5, 6], [7, 8]], [[0, 1], [1, 0]]
    assert built(write(tmp_path, input_ids=rows, weights=weights), mask=("weights",)) == (
        [5, 6, END, 7, 8, END],
        [0, 1, 1, 1, 0, 0],
    )


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "weights",
            [[1, 0], [1, 1], [0, 2]],
            "((row|sample|item) 2|line 3): expected 0 and 1 in 'weights', got 2 at token 1",
        ),
        (
            "weights",
            [[1.0, 1.0], [1.0, -0.5], [0.0, 1.0]],
            r"((row|sample|item) 1|line 2): expected finite weights of .* 'weights', got -0\.5 at token 1",
        ),
        ("weights", [[1.0, 0.5], [float("nan"), 1.0], [0.0, 1.0]], "at least 0 in 'weights', got nan"),
        ("weights", [[1.0, 0.5], [float("inf"), 1.0], [0.0, 1.0]], "at least 0 in 'weights', got inf"),
        (
            "weights",
            [[1.0, 0.5], [65504.0, 65536.0], [0.0, 1.0]],
            "expected weights of at most 65504 in weights, got 65536 at token 1; loss masks keep .* float16",
        ),
        ("attention_mask", [[1.0, 0.5], [1.0, 1.0], [0.0, 1.0]], "0 and 1 in 'attention_mask', got 0.5"),
        ("weights", [[1], [1, 1], [0, 1]], "expected 2 values in 'weights', one a token, got 1"),
        ("labels", [[6, 7], [8, 9], [9, 9]], "got 6 at token 0, which is 5: are the labels shifted"),
        ("weights", [None, [1, 1], [0, 1]], "expected 2 values in 'weights', one a token, got 0"),
    ],
)
def test_a_field_that_is_no_mask_is_refused(
    tmp_path: Path, write: Callable[..., Path], name: str, values: list[Any], message: str
) -> None:
    source = write(tmp_path, input_ids=[[5, 6], [7, 8], [8, 9]], **{name: values})
    with pytest.raises(UnreadableCorpus, match=message):
        built(source, mask=(name,))
    built(source, mask=("none",))


def test_rows_of_the_real_writer_of_mds_give_the_same(tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming")
    columns = {"input_ids": PADDED, "attention_mask": ATTENTION, "labels": LABELS}
    with streaming.MDSWriter(
        out=str(tmp_path / "in"), columns=dict.fromkeys(columns, "ndarray:int64")
    ) as out:
        for row in zip(*columns.values(), strict=True):
            out.write({name: np.array(value) for name, value in zip(columns, row, strict=True)})
    found = built(tmp_path / "in", mask=("labels", "attention_mask"))
    assert found == (joined(DOCUMENTS), joined(TARGETS))
    with pytest.raises(UnreadableCorpus, match="'labels' says that token 0 is no target"):
        built(tmp_path / "in", mask=(), rows=None)


@pytest.mark.parametrize("kind", ["tensor", "numpy"])
def test_items_of_the_real_writer_of_litdata_give_the_same(tmp_path: Path, kind: str) -> None:
    writer = pytest.importorskip("litdata.streaming.writer")
    make = torch.tensor if kind == "tensor" else np.array
    out = writer.BinaryWriter(str(tmp_path / "in"), chunk_bytes=10_000)
    for number, (row, mask, labels) in enumerate(zip(PADDED, ATTENTION, LABELS, strict=True)):
        out[number] = {
            "input_ids": make(row),
            "attention_mask": make(mask),
            "labels": make(labels),
            "n": number,
        }
    out.done()
    out.merge()
    found = built(tmp_path / "in", mask=("labels", "attention_mask"))
    assert found == (joined(DOCUMENTS), joined(TARGETS))


@pytest.mark.parametrize("items", ["dict", "padded"])
def test_padded_items_of_the_real_writer_of_litdata_are_refused(tmp_path: Path, items: str) -> None:
    writer = pytest.importorskip("litdata.streaming.writer")
    out = writer.BinaryWriter(str(tmp_path / "in"), chunk_bytes=10_000)
    for number, (row, mask) in enumerate(zip(PADDED, ATTENTION, strict=True)):
        ids = np.array(row, "i4")
        out[number] = {"input_ids": ids, "attention_mask": np.array(mask)} if items == "dict" else ids
    out.done()
    out.merge()
    message = {
        "dict": "'attention_mask' says that token 4 is no target",
        "padded": "end with token 0 several times",
    }[items]
    with pytest.raises(UnreadableCorpus, match=message):
        built(tmp_path / "in", rows=None)


def test_a_mask_that_nothing_gives_is_refused(tmp_path: Path) -> None:
    source = write_parquet(tmp_path, input_ids=[[1]], text=["a"])
    for named in ("weights", "text"):
        with pytest.raises(UnreadableCorpus, match=f"'{named}'"):
            built(source, mask=(named,))
    with pytest.raises(InvalidParameter, match="mask must be left out without --column"):
        build_here([source], tmp_path / "out", tokenizer="bytes", mask=("labels",))
    with pytest.raises(InvalidParameter, match="mask must be names of fields, or none alone"):
        built(source, mask=("labels", "none"))


def test_merged_corpora_of_weights_of_zeros_and_ones_and_of_none_are_one(tmp_path: Path) -> None:
    fields: list[dict[str, Any]] = [{"weights": [[0.5, 3.0, 0.0]]}, {"weights": [[1, 0, 1]]}, {}]
    for number, each in enumerate(fields):
        (tmp_path / f"{number}").mkdir()
        source = write_parquet(tmp_path / f"{number}", input_ids=[[5 + number, 6, END]], **each)
        build_here(
            [source],
            tmp_path / f"out{number}",
            column="input_ids",
            eot=END,
            rows="documents",
            mask=tuple(each) or ("none",),
        )
    (merged,) = merge([tmp_path / f"out{number}" for number in range(3)], tmp_path / "all").values()
    assert (merged.num_targets, merged.loss_mask_dtype) == (2 + 2 + 3, "float16")
    assert verify(spec_of(tmp_path / "all")).ok
    with open_corpus(tmp_path / "all") as corpus:
        assert corpus.fingerprint == merged.fingerprint
        masks = [shard.mask and (shard.mask.tokens * 1).tolist() for shard in corpus.shards]
        assert masks == [[0.5, 3.0, 0.0], [1, 0, 1], None]
    with RunningServer({"all": tmp_path / "all"}, tmp_path) as server:
        query = (
            "corpus=all&seq_len=2&stride=3&batch_size=3&order=sequential&step=0&format=json&with=loss_mask"
        )
        response = json.loads(server.get(f"/v1/batches?{query}").body)
        assert response["loss_mask"] == [[[0.5, 3.0, 0.0], [1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]]


def test_merged_corpora_keep_their_masks_and_rows_of_a_plan_have_them(tmp_path: Path) -> None:
    for number, fields in enumerate(({"labels": [[-100, 6, 7], [8, 9, -100]]}, {})):
        (tmp_path / f"{number}").mkdir()
        rows = [[5 + number, 6, 7], [8, 9, 3 + number]]
        source = write_parquet(tmp_path / f"{number}", input_ids=rows, **fields)
        options = ("--column", "input_ids", "--eot", END, "--shard-tokens", 4)
        mask = ("--mask", ",".join(fields) or "none")
        said = run_here("build", source, *options, *mask, "--out", tmp_path / f"out{number}")
        assert said.returncode == 0
        assert ("  loss masks of 0 and 1: 5 targets (62.5%)\n" in said.stdout) == bool(fields)
    (merged,) = merge([tmp_path / "out0", tmp_path / "out1"], tmp_path / "both").values()
    assert merged.num_targets == 5 + 8
    assert verify(spec_of(tmp_path / "both")).ok
    with open_corpus(tmp_path / "both") as corpus:
        masks = [
            None if each.mask is None else each.mask.tokens.astype(int).tolist() for each in corpus.shards
        ]
        assert masks == [[0, 1, 1, 1], [1, 1, 0, 0], None, None]
        assert corpus.fingerprint == merged.fingerprint
    with RunningServer({"both": tmp_path / "both"}, tmp_path) as server:
        query = (
            "corpus=both&seq_len=3&stride=4&batch_size=4&order=sequential&step=0&format=json&with=loss_mask"
        )
        response = json.loads(server.get(f"/v1/batches?{query}").body)
        assert np.array(response["loss_mask"]).reshape(4, 4).tolist() == [
            [0, 1, 1, 1],
            [1, 1, 0, 0],
            [1] * 4,
            [1] * 4,
        ]
