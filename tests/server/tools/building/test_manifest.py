"""A manifest is read as it was written, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from corpus_server.errors import UnreadableCorpus
from corpus_server.tools.building.manifest import (
    folders,
    read_manifest,
)
from tests.server.tools.building.built import write_built


@pytest.fixture
def built(tmp_path: Path) -> Path:
    return write_built(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version: Input should be 1"),
        ({"kind": "corpus-hashes"}, "kind: Input should be 'corpus-manifest'"),
        ({"surprise": 1}, "surprise: Unexpected keyword argument"),
        ({"num_tokens": "many"}, "num_tokens: Input should be a valid integer"),
        ({"packing": {"row_tokens": 50}}, "packing: Input should be None"),
        ({"shards": [{"name": "a"}]}, "shards.0.num_tokens: Field required"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_document_is_refused(built: Path, change: dict[str, Any], said: str) -> None:
    path = built / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | change))
    with pytest.raises(UnreadableCorpus) as refused:
        read_manifest(built)
    assert said in refused.value.detail
    assert refused.value.detail.startswith(str(path))


def test_a_corpus_is_named_by_its_folder_its_manifest_or_the_folder_of_its_splits(tmp_path: Path) -> None:
    train, val = (write_built(tmp_path / "a" / name, split=name) for name in ("train", "val"))
    assert folders(tmp_path / "a") == {"train": train, "val": val}
    assert folders(train) == folders(train / "manifest.json") == {None: train}
    assert folders(tmp_path / "nothing") == {None: tmp_path / "nothing"}
