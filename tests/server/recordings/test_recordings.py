"""Recorded losses: which records count, sums that equal a naive loop, and spikes that stand out."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.errors import ReadFailed, ResponseTooLarge, UnknownRecording
from corpus_server.recordings import Recordings, find_spikes, losses, open_recording, sum_losses
from corpus_server.work import Budget, Limits
from tests.recorded import Record, write_part

SESSIONS = st.lists(st.tuples(st.sampled_from([1, 2]), st.integers(0, 6), st.integers(1, 5)), max_size=5)


@settings(max_examples=40)
@given(sessions=SESSIONS, num_bins=st.integers(1, 12))
def test_the_records_of_the_last_session_count(sessions: list[tuple[int, int, int]], num_bins: int) -> None:
    """As in a run whose model is thrown away where an earlier checkpoint is resumed.

    sessions: (world size, first step, steps) of two rows each, whose loss is unique.
    """
    model: dict[tuple[int, int], Record] = {}
    with TemporaryDirectory() as name:
        for number, (world_size, first, num_steps) in enumerate(sessions):
            model = {place: record for place, record in model.items() if place[0] < first}
            for rank in range(world_size):
                records = []
                for step in range(first, first + num_steps):
                    for row in range(2 // world_size * rank, 2 // world_size * (rank + 1)):
                        loss = float(100 * number + 10 * step + row)
                        records.append(Record(step, row, "ab"[(step + row) % 2], loss))
                model |= {(record.step, record.row): record for record in records}
                session = {"world_size": world_size, "first_step": first, "began": 10 * number + rank}
                write_part(Path(name), records, number=number, rank=rank, **session)
        recording = open_recording(Path(name), Budget())
        start, stop = recording.steps
        sums = sum_losses(recording, start, stop, num_bins, Budget())
    steps = [step for step, _ in model]
    assert (start, stop) == ((min(steps), max(steps) + 1) if steps else (0, 0))
    expected = defaultdict[tuple[str, int], list[float]](list)
    for record in model.values():
        expected[record.source, (record.step - start) // sums.width].append(record.loss)
    found = {
        (source, point): (sums.counts[n, point], sums.sums[n, point])
        for n, source in enumerate(recording.sources)
        for point in range(sums.counts.shape[1])
        if sums.counts[n, point]
    }
    assert found == {place: (len(each), sum(each)) for place, each in expected.items()}
    assert sums.counts.shape[1] <= num_bins
    assert sums.num_rows == len(model)


def noisy(num_steps: int, rows: int = 32) -> list[Record]:
    """A model that learns: losses fall from 11 to 3; rare rows of a hard source lie 4 above the others."""
    draw = np.random.default_rng(5)
    return [
        Record(step, row, "hard" if row == 7 else "easy", level + 4 * (row == 7) + draw.normal() / 4)
        for step in range(num_steps)
        for level in [3 + 8 * math.exp(-step / 20)]
        for row in range(rows)
    ]


def test_spikes_stand_out_from_their_source_and_their_time(tmp_path: Path) -> None:
    """Not the first steps, not the hard source, not what is no number; two rows and one that is infinite."""
    records = noisy(200)
    for step, row, loss in ((150, 3, 6.0), (90, 7, 11.0), (20, 1, math.inf), (60, 2, math.nan)):
        n = 32 * step + row
        assert records[n][:2] == (step, row)
        records[n] = records[n]._replace(loss=loss)
    write_part(tmp_path, records[:3000])
    write_part(tmp_path, records[3000:], number=1)
    recording = open_recording(tmp_path, Budget())
    found, sums = find_spikes(recording, 0, 200, 3, Budget())
    assert [(each.step, each.row) for each in found] == [(20, 1), (90, 7), (150, 3)]
    assert [recording.sources[each.source] for each in found] == ["easy", "hard", "easy"]
    assert found[1].usual == pytest.approx(7, abs=0.5)
    assert found[2].usual == pytest.approx(3, abs=0.2)
    assert 8 < found[2].score < 20
    assert sums.num_rows == 200 * 32 - 1
    assert find_spikes(recording, 100, 140, 1, Budget())[0][0].score < 5


def test_a_row_without_others_is_no_spike(tmp_path: Path) -> None:
    write_part(tmp_path, [Record(0, 0, "a", 9.0), Record(0, 1, "b", 1.0), Record(1, 0, "b", 2.0)])
    recording = open_recording(tmp_path, Budget())
    assert find_spikes(recording, 0, 2, 5, Budget())[0] == []


def test_too_many_rows_are_sampled_by_rank_and_refused_beyond(tmp_path: Path) -> None:
    for rank in range(4):
        records = [Record(step, rank, "a", 1.0) for step in range(10)]
        write_part(tmp_path, records, rank=rank, world_size=4)
    recording = open_recording(tmp_path, Budget())
    with mock.patch.object(losses, "SAMPLED_ROWS", 20):
        sums = sum_losses(recording, 0, 10, 5, Budget())
        assert (sums.num_rows, sums.ranks_apart) == (20, 2)
        assert (sum_of := sum_losses(recording, 0, 5, 5, Budget())).num_rows == 20
        assert sum_of.ranks_apart == 1
    with (
        mock.patch.object(losses, "SAMPLED_ROWS", 1),
        pytest.raises(ResponseTooLarge, match="at most 9 rows, this one would take 10"),
    ):
        sum_losses(recording, 0, 10, 5, Budget(Limits(rows=9)))


def test_names_of_megabytes_are_not_read(tmp_path: Path) -> None:
    """Their bytes are known before one of them is decoded."""
    write_part(tmp_path, [Record(0, 0, "x" * (8 << 20), 1.0)])
    (why,) = open_recording(tmp_path, Budget()).unreadable.values()
    assert why.startswith("its column source has 8,3")


def test_files_that_are_no_parts_are_named_and_left_out(tmp_path: Path) -> None:
    """One that is damaged where only reading its rows shows it is an error."""
    good = write_part(tmp_path, [Record(0, 0, "a", 1.0)])
    (tmp_path / ".rank-00000-part-000001.parquet.partial").write_bytes(b"PAR1")
    (tmp_path / "notes.txt").touch()
    bad = {
        "rank-00000-part-000002.parquet": good.read_bytes()[:-9],
        "rank-00000-part-000003.parquet": b"",
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    write_part(tmp_path, [Record(0, 0, "a", 1.0)], number=4, version=2)
    os.mkfifo(tmp_path / "rank-00000-part-000005.parquet")
    (tmp_path / "rank-00000-part-000006.parquet").mkdir()
    recording = open_recording(tmp_path, Budget())
    assert [part.path for part in recording.parts] == [good]
    others = {f"rank-00000-part-{n:06}.parquet" for n in (4, 5, 6)}
    assert set(recording.unreadable) == {*bad, *others}
    assert recording.unreadable["rank-00000-part-000004.parquet"] == "its version is 2, this server reads 1"
    good.write_bytes(good.read_bytes()[:4] + bytes(40) + good.read_bytes()[44:])
    with pytest.raises(ReadFailed, match=r"rank-00000-part-000000.parquet cannot be read"):
        sum_losses(recording, 0, 1, 1, Budget())


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"rank": -1}, "no sound rank"),
        ({"rank": 1}, "no sound rank"),
        ({"first_step": math.inf}, "no sound first_step"),
        ({"rank": 10**13, "world_size": 10**14}, "no sound rank, world_size"),
        ({"world_size": 0}, "no sound rank"),
        ({"plan": "\ud800"}, "no sound plan"),
        ({"sources": "a"}, "no sound sources"),
        ({"sources": [f"{n}" for n in range(1025)]}, "no sound sources"),
        ({"records": [Record(0, -1, "a", 1.0)]}, "rows not negative"),
        ({"records": [Record(2**60, 0, "a", 1.0)]}, "steps must be in"),
        ({"records": [Record(0, 0, "a", None)]}, "without a step, row, source or loss"),  # type: ignore[arg-type]
        ({"described": "[" * 200_000}, "nested deeper"),
    ],
)
def test_what_no_loader_writes_is_left_out(tmp_path: Path, wrong: dict[str, Any], reason: str) -> None:
    """One file's nonsense neither fails the recording nor the list of all."""
    good = write_part(tmp_path, [Record(0, 0, "a", math.nan)], number=1)
    bad = write_part(tmp_path, **{"records": [Record(0, 0, "a", 1.0)], **wrong})
    recording = open_recording(tmp_path, Budget())
    assert [part.path for part in recording.parts] == [good]
    assert reason in recording.unreadable[bad.name]


def test_links_to_nowhere_and_unnamed_sources_are_said(tmp_path: Path) -> None:
    write_part(tmp_path, [Record(0, 0, "b", 1.0)], sources=["a"])
    for number, target in enumerate(("nowhere", "rank-00001-part-000001.parquet")):
        (tmp_path / f"rank-00001-part-{number:06}.parquet").symlink_to(target)
    recording = open_recording(tmp_path, Budget())
    assert len(recording.unreadable) == 2
    with pytest.raises(ReadFailed, match="metadata do not name the source 'b'"):
        sum_losses(recording, 0, 1, 1, Budget())


def test_a_folder_is_a_recording_or_holds_some(tmp_path: Path) -> None:
    """What changes is seen at the next look."""
    recordings = Recordings(tmp_path / "losses")
    assert recordings.names() == {}
    for name in ("b", "a"):
        write_part(tmp_path / "losses" / name, [Record(0, 0, name, 1.0)])
    (tmp_path / "losses" / "empty").mkdir()
    assert list(recordings.names()) == ["a", "b"]
    assert recordings.open("a", Budget()).sources == ("a",)
    write_part(tmp_path / "losses" / "a", [Record(4, 0, "more", 1.0)])
    assert recordings.open("a", Budget()).sources == ("more",)
    assert recordings.open("a", Budget()).steps == (4, 5)
    for name in ("empty", "..", "a/../b", ""):
        with pytest.raises(UnknownRecording):
            recordings.open(name, Budget())
    assert list(Recordings(tmp_path / "losses" / "a").names()) == ["a"]
    assert Recordings(None).names() == {}
