"""`corpus-client export`: the file holds the rows of the steps, in order, and appears only when complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from corpus_client import errors
from corpus_client.arrays import ArrayBatch
from corpus_client.tools.app import app
from corpus_client.tools.row_files import write_array
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step
from tests.client.reference_server import ReferenceServer

PLAN: dict[str, Any] = {
    "seq_len": 16,
    "order": "sequential",
    "seed": 0,
    "stages": [
        {"from_step": 0, "global_batch_size": 8, "mixture": {"web": 1.0}},
        {"from_step": 6, "global_batch_size": 4, "mixture": {"web": 1.0}},
    ],
}
START, STOP = 3, 9


def export(server: ReferenceServer, out: Path, *arguments: str) -> Result:
    plan = out.parent / "plan.json"
    plan.write_text(json.dumps(PLAN))
    options = {"--plan": str(plan), "--out": str(out), "--start": str(START), "--stop": str(STOP)}
    names = {each.partition("=")[0] for each in arguments}
    usual = [word for name, value in options.items() if name not in names for word in (name, value)]
    return CliRunner().invoke(
        app, ["export", server.url, *usual, *arguments], env={"COLUMNS": "120", "NO_COLOR": "1"}
    )


def expected(corpus: ReferenceCorpus) -> list[np.ndarray]:
    plan = {**PLAN, "stride": 16, "skip_steps": []}
    return [tokens_of_step(corpus, plan, step) for step in range(START, STOP)]


@pytest.mark.parametrize("kind", ["bin", "npy", "parquet"])
def test_a_file_holds_the_rows_in_order(
    server: ReferenceServer, corpus: ReferenceCorpus, tmp_path: Path, kind: str
) -> None:
    out = tmp_path / f"rows.{kind}"
    done = export(server, out, "--format", kind, "--json")
    assert done.exit_code == 0, done.stderr
    rows = np.concatenate(expected(corpus))
    assert json.loads(done.stdout)["num_rows"] == len(rows) == 36
    if kind == "bin":
        assert out.read_bytes() == rows.astype("<u2").tobytes()
    elif kind == "npy":
        loaded = np.load(out)
        assert loaded.dtype == np.uint16
        np.testing.assert_array_equal(loaded, rows)
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        table = parquet.read_table(out)
        assert table["tokens"].to_pylist() == rows.tolist()
        places = [(s, r) for s, each in enumerate(expected(corpus), START) for r in range(len(each))]
        assert list(zip(table["step"].to_pylist(), table["row"].to_pylist(), strict=True)) == places
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", out.name]


def test_mds_is_read_by_its_own_library(
    server: ReferenceServer, corpus: ReferenceCorpus, tmp_path: Path
) -> None:
    streaming = pytest.importorskip("streaming", reason="needs mosaicml-streaming")
    done = export(server, tmp_path / "mds", "--format", "mds")
    assert done.exit_code == 0, done.stderr
    rows = [each["tokens"] for each in streaming.LocalDataset(str(tmp_path / "mds"))]
    np.testing.assert_array_equal(np.stack(rows), np.concatenate(expected(corpus)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--start", "9"], "0 <= start < stop, got"),
        (["--plan", "/no/such/plan.json"], "No such file"),
        (["--out", "/no/such/rows.npy"], "error: /no/such/rows.npy cannot be written: No such file"),
        (["--out", "/dev/null/rows"], "error: /dev/null/rows cannot be written: Not a directory"),
        (["--out", "/"], "error: / exists; name another file"),
        (["--out="], "error: --out is empty; give it a value, or leave it out"),
        (["--out", "n" * 300], "cannot be written: File name too long"),
        (["--stop", "9" * 20], f"error: --stop must be at most {2**63 - 1} (2^63 - 1), got {'9' * 20}"),
        (["--token-file", "/no/such"], "auth must name a file with a token, got '/no/such': No such file"),
    ],
)
def test_what_cannot_be_exported_is_named_and_leaves_nothing(
    server: ReferenceServer, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = export(server, tmp_path / "rows.npy", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_rows_of_two_lengths_are_refused_where_the_file_could_not_tell(tmp_path: Path) -> None:
    tokens = [np.zeros((2, 9 - step), np.uint16) for step in range(2)]
    batches = [ArrayBatch(step=step, tokens=each, plan=Mock()) for step, each in enumerate(tokens)]
    with pytest.raises(errors.InvalidArgument, match="got 9 tokens up to step 0 and 8 from there on"):
        write_array(tmp_path / "rows.npy", batches, has_header=True)
