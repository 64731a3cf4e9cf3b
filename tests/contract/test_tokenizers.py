"""A new plan mixes corpora of one tokenizer, unless it says otherwise; what is not known is said once."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from corpus_client import ArrayLoader, CorpusIterableDataset, CorpusLoader, errors
from tests.conftest import word_tokens
from tests.corpora import some_tokens, write_npy, write_raw
from tests.serving import RunningServer, run_here

TEXTS = "".join(json.dumps({"text": f"text number {number}. " * 9}) + "\n" for number in range(40))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of corpora by these tokenizers.

    bpe, more       a tokenizer.json beside the shards, the same file in two folders
    built, bytes    made by `build`, of a copy of that file and of bytes
    large           ids beyond every vocabulary, no tokenizer
    raw, other      small ids, no tokenizer; uint8, which is decoded as bytes
    """
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "texts.jsonl").write_text(TEXTS)
    for name in ("bpe", "more"):
        (folder / name).mkdir()
    words = word_tokens(folder / "bpe" / "tokenizer.json")
    shutil.copy(folder / "bpe" / "tokenizer.json", folder / "more")
    for name in ("bpe", "more"):
        write_raw(folder / name / "0.bin", words)
    for name, tokenizer in (("built", folder / "bpe" / "tokenizer.json"), ("bytes", "bytes")):
        done = run_here(
            "build", folder / "texts.jsonl", "--tokenizer", tokenizer, "--eot", "0", "--out", folder / name
        )
        assert done.returncode == 0, done.stderr
    write_raw(folder / "large.bin", some_tokens(5000))
    write_raw(folder / "raw.bin", some_tokens(5000, vocabulary=200))
    write_npy(folder / "other.npy", np.arange(5000) % 251, dtype="uint8")
    corpora = {name: folder / name for name in ("bpe", "more", "built", "bytes")}
    corpora |= {"large": folder / "large.bin", "raw": folder / "raw.bin", "other": folder / "other.npy"}
    with RunningServer(corpora, folder) as running:
        yield running


def plan_of(*names: str, **fields: Any) -> dict[str, Any]:
    stage = {"from_step": 0, "global_batch_size": 4, "mixture": dict.fromkeys(names, 1)}
    return {"seq_len": 16, "stages": [stage], **fields}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("bpe", "bytes"), ["'bpe' (tokenizer.json, xxh3-128=", "'bytes' (bytes)", "different tokenizers"]),
        (("built", "raw", "bytes"), ["'built' (tokenizer.json, xxh3-128=", "'bytes' (bytes)"]),
        (("bpe", "large"), ["'large' holds token", "tokenizer of corpus 'bpe'", "are below 300"]),
    ],
)
def test_corpora_of_different_tokenizers_are_refused_by_name(
    server: RunningServer, names: tuple[str, ...], said: list[str]
) -> None:
    problem = server.post_plan(plan_of(*names))
    assert problem.status == 422
    found = problem.json()
    assert (found["type"].rpartition("/")[2], found["parameter"]) == ("invalid-plan", "tokenizers")
    assert all(each in found["detail"] for each in said), found["detail"]
    assert '"tokenizers": "differ"' in found["remedy"]
    meant = server.post_plan(plan_of(*names, tokenizers="differ"))
    assert (meant.status, meant.json()["warnings"]) == (200, [])


def test_corpora_of_one_tokenizer_are_mixed(server: RunningServer) -> None:
    response = server.post_plan(plan_of("bpe", "more", "built")).json()
    identities = {each["tokenizer_identity"] for each in response["sources"].values()}
    assert len(identities) == 1
    assert response["warnings"] == []
    assert "tokenizers" not in response["plan"]  # so the id is that of releases before


def test_a_plan_that_was_made_before_goes_on(server: RunningServer) -> None:
    """Its document has the fingerprints of all its corpora, as the state of a loader has it."""
    made = server.post_plan(plan_of("bpe", "bytes", tokenizers="differ")).json()
    document = {name: value for name, value in made["plan"].items() if name != "tokenizers"}
    response = server.post_plan(document)
    assert response.status == 200
    (said,) = response.json()["warnings"]
    assert "have different tokenizers" in said
    fingerprints = {**document["fingerprints"]}
    del fingerprints["bytes"]
    assert server.post_plan({**document, "fingerprints": fingerprints}).status == 422


def test_what_continues_a_plan_says_what_the_plan_says(server: RunningServer) -> None:
    stage = {"from_step": 9, "global_batch_size": 4, "mixture": {"bpe": 1, "bytes": 1}}
    plain, meant = (
        server.post_plan(plan_of("bpe", **fields)).json()["id"] for fields in ({}, {"tokenizers": "differ"})
    )
    refused = server.post_plan({"parent": plain, "stages": [stage]})
    assert (refused.status, refused.json()["parameter"]) == (422, "tokenizers")
    assert server.post_plan({"parent": meant, "stages": [stage]}).status == 200


def test_a_document_of_megabytes_is_compared_too(server: RunningServer) -> None:
    """It is parsed in another process, which fills in the fingerprints."""
    document = plan_of("bpe", "bytes")
    document["skip_steps"] = [[1000 * number, 1000 * number + 1] for number in range(80_000)]
    assert len(json.dumps(document)) > 2**20
    assert server.post_plan(document).json()["parameter"] == "tokenizers"


def test_what_cannot_be_compared_is_said_once(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A small uint8 corpus is decoded as bytes, but nobody said that it is made of bytes."""
    plan = plan_of("bpe", "raw", "other")
    (said,) = server.post_plan(plan).json()["warnings"]
    assert "that of other, raw is not known" in said
    with caplog.at_level(logging.WARNING, "corpus_client"):
        for _ in range(2):
            with CorpusLoader(server.url, plan=plan, device="cpu") as loader:
                next(loader)
    assert [said in record.getMessage() for record in caplog.records].count(True) == 1


def test_the_loader_raises_the_refusal_and_takes_what_it_names(server: RunningServer) -> None:
    with pytest.raises(errors.ServerError, match=r"different tokenizers.*differ"):
        CorpusLoader(server.url, plan=plan_of("more", "bytes"), device="cpu")
    mixture = {"corpus": {"more": 0.5, "bytes": 0.5}, "seq_len": 8, "global_batch_size": 4}
    for kind, more in ((CorpusLoader, {"device": "cpu"}), (ArrayLoader, {}), (CorpusIterableDataset, {})):
        with pytest.raises(errors.ServerError, match='tokenizers="differ" of a loader'):
            kind(server.url, **mixture, **more)
        kind(server.url, **mixture, **more, tokenizers="differ")


def test_the_identity_is_shown(server: RunningServer) -> None:
    told = {each["name"]: each["tokenizer_identity"] for each in server.get("/v1/corpora").json()["corpora"]}
    assert told["bytes"] == "bytes"
    assert told["bpe"] == told["more"] == told["built"]
    assert told["bpe"].startswith("xxh3-128=")
    assert told["raw"] is told["other"] is told["large"] is None
    shown = run_here("inspect", server.folder / "built")
    assert told["built"] in shown.stdout.replace("\n", "")


def test_another_tokenizer_than_that_of_the_build_is_a_warning(server: RunningServer) -> None:
    """Its identity is that of the build, which made the tokens."""
    with (server.folder / "bpe" / "tokenizer.json").open() as file:
        document = json.load(file)
    other = server.folder / "other-tokenizer.json"
    other.write_text(json.dumps(document, indent=3))
    shown = run_here("inspect", f"{server.folder / 'built'},tokenizer={other}")
    assert "was built with the tokenizer xxh3-128=" in shown.stderr
    assert "served with other-tokenizer.json" in shown.stderr
