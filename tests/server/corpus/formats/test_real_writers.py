"""Files by the formats' own writers are read as their own readers read them.

`format_fixtures` wrote real/CASE/ and real/expected.json, which names writers and versions.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.index import index
from corpus_server.errors import UnreadableCorpus
from tests.corpora import open_corpus, spec

REAL = Path(__file__).parent / "real"
EXPECTED: dict[str, dict[str, Any]] = json.loads((REAL / "expected.json").read_text())

SERVED = [name for name, case in EXPECTED.items() if "refused" not in case]
REFUSED = [name for name, case in EXPECTED.items() if "refused" in case]


def opened(name: str, folder: Path = REAL) -> Corpus:
    case = EXPECTED[name]
    return open_corpus(folder / name / case["path"], **case.get("options", {}))


def ranges(corpus: Corpus) -> list[list[int]] | None:
    if corpus.num_documents is None:
        return None
    return [list(corpus.document_range(number)) for number in range(corpus.num_documents)]


def test_every_case_is_there() -> None:
    assert {path.name for path in REAL.iterdir() if path.is_dir()} == set(EXPECTED)
    assert {"megatron", "datatrove", "olmo", "mds", "litdata", "numpy", "nanogpt", "llmc"} == {
        name.partition("_")[0] for name in SERVED
    }


@pytest.mark.parametrize("name", SERVED)
def test_tokens_documents_and_masks_are_those_of_the_own_reader(name: str) -> None:
    case = EXPECTED[name]
    with opened(name) as corpus:
        assert corpus.dtype.name == case["dtype"]
        assert [token for shard in corpus.shards for token in shard.tokens.tolist()] == case["tokens"]
        masks = [shard.mask.tokens.astype(int).tolist() for shard in corpus.shards if shard.mask]
        assert masks == ([case["mask"]] if "mask" in case else [])
        assert ranges(corpus) == case.get("documents")
        problems = [shard.documents.find_problem() for shard in corpus.shards if shard.documents]
        assert not any(problems)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_mapped_is_refused_with_its_reason_and_a_way_out(name: str) -> None:
    with pytest.raises(UnreadableCorpus, match=EXPECTED[name]["refused"]) as caught:
        opened(name)
    assert caught.value.remedy


@pytest.mark.parametrize("name", [name for name in SERVED if "listed_documents" in EXPECTED[name]])
def test_listed_documents_are_indexed_without_an_end_of_text_id(tmp_path: Path, name: str) -> None:
    shutil.copytree(REAL / name, tmp_path / name)
    case = EXPECTED[name]
    index(spec(tmp_path / name / case["path"], **case["options"]))
    with opened(name, tmp_path) as corpus:
        assert ranges(corpus) == case["listed_documents"]
    kept = index(spec(tmp_path / name / case["path"], **case["options"]))
    assert [shard.action for shard in kept.shards] == ["kept"]
