"""Plans from MosaicML's streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from corpus_server.tools.importing import Imported
from tests.server.tools.importing.configurations import (
    OF_DISJOINT,
    OWN_ORDER,
    document,
    imported,
)

STREAMS: dict[str, Any] = {
    "global_train_batch_size": 256,
    "max_seq_len": 4096,
    "train_loader": {
        "dataset": {
            "shuffle": True,
            "shuffle_seed": 17,
            "shuffle_algo": "py1e",
            "streams": {
                "web": {"remote": "s3://b/web", "local": "/tmp/web", "split": "train", "proportion": 3},
                "code": {"remote": "s3://b/code", "proportion": 1, "download_retry": 2},
            },
        }
    },
}


def test_mosaicml_streams_keep_their_samples() -> None:
    assert imported("mosaicml", json.dumps(STREAMS)) == Imported(
        document=document({"web": 3.0, "code": 1.0}, 256, seq_len=4095, stride=4096, seed=17),
        corpora={"web": "s3://b/web/train", "code": "s3://b/code"},
        left_out=["streams.code: download_retry", "dataset: shuffle_algo", OWN_ORDER, OF_DISJOINT],
    )


@pytest.mark.parametrize(
    ("dataset", "corpora"),
    [
        ({"remote": "s3://b/web", "split": "train"}, {"train": "s3://b/web/train"}),
        ({"local": "/tmp/web", "shuffle": False}, {"train": "/tmp/web"}),
        ({"remote": "s3://b/web", "local": "/tmp/web"}, {"train": "s3://b/web"}),
        ({"remote": "s3://b", "streams": {"a": {"split": "x"}}}, {"a": "s3://b/x"}),
    ],
)
def test_a_mosaicml_dataset_may_be_one_stream(dataset: dict[str, Any], corpora: dict[str, str]) -> None:
    """Of the length, that of the dataset counts before that of the model."""
    said = {**dataset, "max_seq_len": 128}
    outer = {"max_seq_len": 64, "global_train_batch_size": 8, "train_loader": {"dataset": said}}
    (name,) = corpora
    expected = Imported(
        document=document({name: 1.0}, 8, seq_len=127, stride=128, seed=9176, order="sequential"),
        corpora=corpora,
        left_out=[OF_DISJOINT],
    )
    assert imported("mosaicml", json.dumps(outer)) == expected
    assert imported("mosaicml", json.dumps({"dataset": said}), batch_size=8) == expected
    assert imported("mosaicml", json.dumps({"train_loader": said}), batch_size=8) == expected
    assert imported("mosaicml", json.dumps(said), batch_size=8) == expected
