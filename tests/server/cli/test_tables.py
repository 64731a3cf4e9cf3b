"""Tables on a terminal of 80 columns: every word that a wide one shows is there whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from corpus_server.plan import Plan
from corpus_server.plan_store import PlanStore
from tests.corpora import some_tokens, write_raw
from tests.serving import run_here

MIXTURE = {"code": 0.4, "text": 0.3, "web": 0.3}
HEADS = {"corpus", "field", "id", "shard"}
"""Of the first column, which paragraphs have not."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with three corpora, and `state` with two plans of two runs."""
    folder = tmp_path_factory.mktemp("tables")
    for name in MIXTURE:
        (folder / name).mkdir()
        write_raw(folder / name / f"{name}-train-shard-000000.bin", some_tokens(5000))
    orders: tuple[Any, ...] = ("sequential", {"shuffle": {"block_windows": 64, "group_blocks": 2}})
    with PlanStore(folder / "state") as store:
        for seed, order in enumerate(orders):
            stages = [{"global_batch_size": 128, "mixture": MIXTURE}]
            plan = {"seq_len": 16, "order": order, "seed": seed, "stages": stages}
            plan["skip_steps"] = [[40, 42]] * seed
            plan["fingerprints"] = {name: f"full-{number:064}" for number, name in enumerate(MIXTURE)}
            store.add(Plan.from_json(plan), run=f"r{seed}")
    return folder


def words_in(output: str) -> set[str]:
    return set(re.split(r"[\s\u2500-\u257f;]+", output))


@pytest.mark.parametrize(
    "command",
    [
        "plans list --state-dir {0}/state",
        "plans diff {a} {b} --state-dir {0}/state",
        "find " + "".join(f"the-corpus-of-{name}-train={{0}}/{name} " for name in MIXTURE) + "--tokens 1,2,3",
        "inspect {0}/text",
    ],
)
@pytest.mark.parametrize("columns", [80, 60])
def test_a_narrow_terminal_shows_whole_words(folder: Path, command: str, columns: int) -> None:
    with PlanStore(folder / "state", read_only=True) as store:
        a, b = (plan.id for plan, *_ in store.newest(2))
    words = command.format(folder, a=a, b=b).split()
    wide, narrow = (run_here(*words, COLUMNS=str(each)) for each in (300, columns))
    assert narrow.returncode == 0, narrow.stderr
    shown = {word for word in words_in(wide.stdout) - HEADS if len(word) < columns}
    assert shown - words_in(narrow.stdout) == set(), narrow.stdout
    tables = [line for line in narrow.stdout.splitlines() if re.match("[\u2500-\u257f]", line)]
    assert max(map(len, tables), default=0) <= columns


def test_a_view_says_that_it_counts_repetitions(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    write_raw(tmp_path / "web" / "0.bin", [1, 2, 0, 3, 0])
    assert run_here("index", f"{tmp_path}/web,eot=0").returncode == 0
    for repeat, told in ((["--repeat", "2"], "4 (each repetition counts) from 2"), ([], "2 from 2")):
        out = tmp_path / f"made-{len(repeat)}.view"
        made = run_here("view", "create", tmp_path / "web", *repeat, "--out", out)
        assert made.returncode == 0, made.stderr
        assert f"documents    {told}" in made.stdout
