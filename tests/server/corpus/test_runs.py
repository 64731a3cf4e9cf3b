"""A token file may hold several runs of tokens, with other bytes between them: each is a shard."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.formats import registry
from corpus_server.corpus.formats.layout import Format, Run, ShardLayout, TokenDtype
from corpus_server.corpus.index import index
from corpus_server.corpus.shards import open_runs
from corpus_server.corpus.verify import record, verify
from corpus_server.plan import Plan
from corpus_server.work import Budget
from tests.corpora import open_corpus, open_files, some_tokens, spec, write_raw
from tests.serving import command, environment

RUNS = [some_tokens(count, seed=count) for count in (1000, 0, 37, 500)]
GAP = b"between runs "  # 13 bytes: runs are aligned in every way


def write_runs(path: Path, runs: Sequence[np.ndarray] = RUNS) -> Path:
    """Write a file of the test's format: RUNS, their number, offset and length of each, the runs."""
    head = 8 + 16 * len(runs)
    body, table = b"", b""
    for run in runs:
        body += GAP
        table += struct.pack("<QQ", head + len(body), run.size)
        body += run.astype("<u2").tobytes()
    path.write_bytes(b"RUNS" + struct.pack("<I", len(runs)) + table + body)
    return path


def read_runs(file: OpenFile, dtype: TokenDtype | None, in_folder: bool) -> ShardLayout | None:
    head = file.head(8)
    if not head.startswith(b"RUNS"):
        return None
    table = struct.iter_unpack("<QQ", file.read(8, 16 * int.from_bytes(head[4:], "little")))
    runs = tuple(Run(*each) for each in table)
    return ShardLayout(format="runs", reason="begins with RUNS", dtype=np.dtype("<u2"), runs=runs)


@pytest.fixture(autouse=True)
def a_format_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FORMATS", (Format(read=read_runs), *registry.FORMATS))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "in").mkdir()
    write_runs(tmp_path / "in" / "a.bin")
    write_runs(tmp_path / "in" / "b.bin", [some_tokens(100)])
    before = open_files()
    yield tmp_path / "in"
    assert not open_files() - before


def test_each_run_is_a_shard_of_its_file(folder: Path) -> None:
    with open_corpus(folder) as corpus:
        names = [shard.name for shard in corpus.shards]
        assert names == ["a.bin:0", "a.bin:1", "a.bin:2", "a.bin:3", "b.bin"]
        assert [shard["file"] for shard in corpus.describe()["shards"]] == ["a.bin"] * 4 + ["b.bin"]
        for shard, tokens in zip(corpus.shards, [*RUNS, some_tokens(100)], strict=True):
            np.testing.assert_array_equal(shard.tokens, tokens)
            assert shard.read_data(0, shard.data_bytes) == tokens.astype("<u2").tobytes()
        assert len({shard.file for shard in corpus.shards}) == 2


def test_files_take_one_descriptor_each_however_many_runs_they_hold(folder: Path) -> None:
    before = open_files()
    with open_corpus(folder):
        assert len(open_files() - before) == 2


def test_no_window_of_a_plan_crosses_from_one_run_to_the_next(folder: Path) -> None:
    with Catalog.open([spec(folder)]) as catalog:
        plan = Plan.from_json(
            {"seq_len": 9, "stride": 10, "order": "sequential", "seed": 0,
             "stages": [{"from_step": 0, "global_batch_size": 163, "mixture": {"c": 1.0}}]}
        )  # fmt: skip
        bound = catalog.bind(plan, Budget())
        locations = bound.sampler.pieces(0, range(163)).places[:, :2]
        expected = [
            run[at : at + 10] for run in [*RUNS, some_tokens(100)] for at in range(0, run.size - 9, 10)
        ]
        np.testing.assert_array_equal(bound.gatherer.gather(locations, 10, bound.dtype), expected)


def test_the_files_last_run_closes_it(tmp_path: Path) -> None:
    before = open_files()
    runs = open_runs(write_runs(tmp_path / "a.bin"))
    for run in runs[1:]:
        run.close()
    np.testing.assert_array_equal(runs[0].tokens, RUNS[0])
    runs[0].file.check_unchanged()
    runs[0].close()
    runs[0].close()
    assert not open_files() - before


@pytest.mark.parametrize("token_range", [(0, 10), (990, 1030), (1037, 1637), (1537, 1600)])
def test_a_range_of_tokens_holds_the_runs_that_it_touches(folder: Path, token_range: tuple[int, int]) -> None:
    everything = np.concatenate([*RUNS, some_tokens(100)])
    with open_corpus(folder, token_range=token_range) as corpus:
        found = np.concatenate([shard.tokens for shard in corpus.shards])
        np.testing.assert_array_equal(found, everything[slice(*token_range)])


def test_documents_of_all_runs_lie_in_one_sidecar(folder: Path) -> None:
    eot = int(RUNS[0][70])
    index(spec(folder, eot=eot))
    assert sorted(path.name for path in folder.glob("*.documents")) == ["a.bin.documents", "b.bin.documents"]
    assert index(spec(folder, eot=eot)).shards[0].action == "kept"
    with open_corpus(folder) as corpus:
        base, expected = 0, []
        for run in [*RUNS, some_tokens(100)]:  # a document ends with its run
            ends = sorted({*(np.flatnonzero(run == eot) + 1).tolist(), *([run.size] if run.size else [])})
            expected += [(base + a, base + b) for a, b in zip([0, *ends], ends, strict=False)]
            base += run.size
        assert [corpus.document_range(number) for number in range(corpus.num_documents or 0)] == expected
    assert verify(spec(folder)).ok


def test_hashes_are_recorded_for_each_run_and_a_changed_byte_is_named(folder: Path) -> None:
    assert record(spec(folder)).num_shards == 5
    assert verify(spec(folder)).ok
    with open_corpus(folder) as corpus:
        assert corpus.fingerprint_kind == "full"
        offset = corpus.shards[3].data_offset
    content = bytearray((folder / "a.bin").read_bytes())
    content[offset] ^= 1
    (folder / "a.bin").write_bytes(content)
    found = verify(spec(folder))
    assert [(block.shard, block.block) for block in found.bad_blocks] == [("a.bin:3", 0)]
    (folder / "a.bin").unlink()
    found = verify(spec(folder))
    assert {problem.shard for problem in found.problems} == {f"a.bin:{number}" for number in range(4)}


@pytest.mark.parametrize(
    ("subcommand", "num_files", "code"), [("inspect", 200, 0), ("inspect", 400, 2), ("verify", 200, 0)]
)
def test_a_token_file_takes_one_descriptor_and_the_error_names_the_limit(
    tmp_path: Path, subcommand: str, num_files: int, code: int
) -> None:
    """The hard limit counts: the soft one is raised to it."""
    for number in range(num_files):
        write_raw(tmp_path / f"{number}.bin", range(10))
    limited = 'ulimit -Sn 100 && ulimit -Hn 300 && exec "$@"'
    words = ["sh", "-c", limited, "sh", *command(subcommand, tmp_path)]
    ended = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert ("(ulimit -n, LimitNOFILE), which is 300" in ended.stderr) == (code == 2)
