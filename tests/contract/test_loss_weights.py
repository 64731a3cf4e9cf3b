"""Loss masks of weights, from files beside token files to `batch.loss_mask`, mixed with those of 0 and 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corpus_client import ArrayLoader, errors
from corpus_client.integrations.causal_lm import causal_lm, packed_lm
from corpus_server.corpus.index import index
from examples.for_nanogpt import GetBatch
from tests.corpora import spec, write_megatron, write_raw
from tests.loaders import open_loader
from tests.serving import RunningServer
from tests.views import write_view

EOT = 7
SEQ_LEN = 16
SOURCES = ("bits", "none", "rl")  # as plans number them
MIXED: dict[str, Any] = {
    "seq_len": SEQ_LEN,
    "seed": 3,
    "stages": [{"global_batch_size": 12, "mixture": dict.fromkeys(SOURCES, 1 / 3)}],
}
MEGATRON = {
    "seq_len": SEQ_LEN,
    "order": {"megatron": {"num_samples": 72}},
    "stages": [{"global_batch_size": 12, "mixture": {"docs": 1}}],
}


def weight_of(tokens: Any) -> np.ndarray:
    """What float16 keeps of a weight that follows from the token: 0, 0.37, 0.74 and so on."""
    return (np.asarray(tokens) % 8 * 0.37).astype(np.float16).astype(np.float32)


def expected(source: str, tokens: np.ndarray) -> np.ndarray:
    return {"bits": tokens % 2, "none": np.ones_like(tokens), "rl": weight_of(tokens)}[source]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    for number, name in enumerate(SOURCES):
        (folder / name).mkdir()
        tokens = np.random.default_rng(number).integers(0, 50_000, 3000)
        tokens[28::29] = tokens[-1] = EOT
        write_raw(folder / name / "0.bin", tokens, dtype="uint32")
        if name != "none":
            mask = tokens % 2 == 1 if name == "bits" else weight_of(tokens).astype(np.float16)
            np.save(folder / name / "0.bin.mask.npy", mask)
        index(spec(folder / name, eot=EOT, dtype="uint32"))
    documents = [part.tolist() for part in np.split(np.arange(600), range(0, 600, 47)[1:])]
    data = write_megatron(folder / "docs", documents)
    np.save(data.with_name(f"{data.name}.mask.npy"), weight_of(np.arange(600)).astype(np.float16))
    write_view(folder / "rl", [n % 3 for n in range(104)], folder / "half.view")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    arguments = [f"{name}={folder / name},dtype=uint32" for name in SOURCES]
    arguments += [f"docs={folder / 'docs.bin'}", f"half=rl?view={folder / 'half.view'}"]
    with RunningServer({}, tmp_path_factory.mktemp("server"), arguments=arguments) as running:
        yield running


def loader(server: RunningServer, plan: dict[str, Any] = MIXED, **options: Any) -> Any:
    part = {"device": "cpu", "rank": 0, "world_size": 1, "num_steps": 6}
    return open_loader(server.url, **{"plan": plan, **part, **options})


def of(corpus: str, **fields: Any) -> dict[str, Any]:
    return {**MIXED, "stages": [{"global_batch_size": 12, "mixture": {corpus: 1}}], **fields}


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("rows", ["windows", "documents"])
def test_a_mixture_has_weights_where_a_corpus_has_them_and_zero_or_one_elsewhere(
    server: RunningServer, folder: Path, local: bool, rows: str
) -> None:
    options = {"local_root": {name: folder / name for name in SOURCES}} if local else {}
    seen = set()
    with loader(server, {**MIXED, "rows": rows}, sources=True, eot_id=EOT, **options) as batches:
        for batch in batches:
            assert (batch.corpus_mask.dtype, batch.loss_mask.dtype) == (torch.float32, torch.float32)
            inputs, targets = batch.inputs.numpy(), batch.targets.numpy()
            wanted = np.stack(
                [expected(SOURCES[n], row) for n, row in zip(batch.sources.tolist(), targets, strict=True)]
            )
            found = batch.corpus_mask.numpy()
            filled = (found == 0) & (targets == EOT)  # the unused end of a row of documents
            assert np.where(filled, wanted, found).tolist() == wanted.tolist()
            assert rows == "documents" or (found == wanted).all()
            assert batch.loss_mask.tolist() == (found * (inputs != EOT)).tolist()
            seen |= set(found.ravel().tolist())
    assert seen == {float(each) for each in weight_of(np.arange(8))} | {1.0}


@pytest.mark.parametrize(
    "plan", [MEGATRON, of("half"), of("half", rows="documents")], ids=["megatron", "view", "packed"]
)
def test_rows_that_join_pieces_have_their_weights(server: RunningServer, plan: dict[str, Any]) -> None:
    with loader(server, plan) as batches:
        for batch in batches:
            found, wanted = batch.corpus_mask.numpy(), weight_of(batch.targets)
            filled = (found == 0) & (batch.targets.numpy() == EOT)
            assert np.where(filled, wanted, found).tolist() == wanted.tolist()


def test_a_context_rank_and_arrays_have_the_weights_of_their_part(server: RunningServer) -> None:
    with loader(server, of("rl"), context_parallel=(1, 2), context_order="zigzag") as batches:
        inputs, targets = torch.empty(2, 12, 8, dtype=torch.int64)
        for batch in (batches.next_into(inputs, targets), next(batches)):
            assert batch.corpus_mask.tolist() == weight_of(batch.targets).tolist()
    with ArrayLoader(server.url, plan=of("rl"), rank=0, world_size=1) as arrays:
        batch = next(arrays)
        assert batch.loss_mask is not None
        assert (batch.loss_mask.dtype, batch.loss_mask.tolist()) == (
            np.float32,
            weight_of(batch.targets).tolist(),
        )


def test_a_stage_that_brings_weights_has_them_from_its_first_step_on(server: RunningServer) -> None:
    with loader(server, of("bits")) as batches:
        assert next(batches).corpus_mask.dtype == torch.bool
        batches.extend({"mixture": {"rl": 1}})
        batch = next(batches)
        assert batch.corpus_mask.tolist() == weight_of(batch.targets).tolist()


def test_what_takes_no_weights_refuses_them_and_can_leave_them_out(server: RunningServer) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"weights.*multiply the losses by batch\.loss_mask"):
        loader(server, ignore_index=-100, eot_id=EOT)
    with loader(server, eot_id=EOT) as batches:
        batch = next(batches)
        for convert in (causal_lm, packed_lm):
            with pytest.raises(errors.InvalidArgument, match="weights, which this framework's loss does not"):
                convert(batch)
    with (
        GetBatch(server.url, {"train": "rl"}, 6, SEQ_LEN, device="cpu") as get_batch,
        pytest.raises(errors.InvalidArgument, match="loss_mask=False trains on all tokens alike"),
    ):
        get_batch("train")
    with loader(server, loss_mask=False, ignore_index=-100, eot_id=EOT) as batches:
        assert next(batches).corpus_mask is None


def test_the_response_says_its_type_and_a_plan_without_weights_has_bytes(server: RunningServer) -> None:
    for names, dtype in ((SOURCES, "float16"), (("bits", "none"), "uint8")):
        mixture = dict.fromkeys(names, 1 / len(names))
        plan = {**MIXED, "stages": [{"global_batch_size": 12, "mixture": mixture}]}
        described = server.post_plan(plan).json()
        assert described["loss_mask_dtype"] == dtype
        asked = {"plan": described["id"], "step": 0, "with": "loss_mask"}
        response = server.get("/v1/batches", **asked)
        assert response.headers["Corpus-Arrays"] == f"loss_mask {dtype} 1,12,17"
        found = np.frombuffer(response.body, dtype, count=12 * 17, offset=12 * 17 * 4)
        in_json = server.get("/v1/batches", **asked, format="json").json()
        assert np.ravel(in_json["loss_mask"]).astype(dtype).tolist() == found.tolist()


def test_spans_show_the_weights_of_their_tokens(server: RunningServer) -> None:
    spans = server.get("/v1/corpora/rl/spans", count=40, targets="true").json()["spans"]
    of_tokens = [(token, span["loss_mask"]) for span in spans for token in span["tokens"]]
    assert [weight for _, weight in of_tokens] == weight_of([token for token, _ in of_tokens]).tolist()
    described = server.post_plan(of("rl")).json()
    (row,) = server.get(f"/v1/plans/{described['id']}/rows", step=0, count=1, targets="true").json()["rows"]
    of_tokens = [(token, span["loss_mask"]) for span in row["spans"] for token in span["tokens"]]
    assert [weight for _, weight in of_tokens] == weight_of([token for token, _ in of_tokens]).tolist()
    masks = [each["loss_mask"] for each in server.get("/v1/corpora/rl").json()["shards"]]
    assert [(each["file"], each["dtype"]) for each in masks] == [("0.bin.mask.npy", "float16")]
