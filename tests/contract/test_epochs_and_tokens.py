"""Both halves over plans in epochs and tokens: what comes, where it ends, and what any face says of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from corpus_client import ArrayLoader, CorpusIterableDataset, CorpusLoader, errors
from tests.conftest import ServedCorpus
from tests.serving import RunningServer, check_problem, run_here

SEQ_LEN = 16
EPOCHS = {"web": 1, "mixed": 2}
DOCUMENT: dict[str, Any] = {
    "seq_len": SEQ_LEN,
    "seed": 7,
    "stages": [{"global_batch_size": 24, "epochs": EPOCHS}],
}
ROWS = 4  # by which a mixture may miss its share


def windows(corpus: ServedCorpus) -> dict[tuple[int, ...], int]:
    """How often each window stands in the corpus."""
    return Counter(
        tuple(shard[start : start + SEQ_LEN + 1].tolist())
        for shard in corpus.shards
        for start in range(0, len(shard) - SEQ_LEN, SEQ_LEN)
    )


def open_loader(server: RunningServer, **changes: Any) -> CorpusLoader:
    options: dict[str, Any] = {"seq_len": SEQ_LEN, "global_batch_size": 24, "seed": 7, "device": "cpu"}
    return CorpusLoader(server.url, **options | changes)


def test_a_run_ends_when_its_epochs_are_over(corpora: dict[str, ServedCorpus], server: RunningServer) -> None:
    """Every row is counted: each window of `web` came once, each of `mixed` twice, to some rows."""
    posted = server.post_plan(DOCUMENT).json()
    sizes = {name: posted["sources"][name]["num_windows"] for name in EPOCHS}
    with open_loader(server, epochs=EPOCHS) as loader:
        assert loader.plan_id == posted["id"]
        assert len(loader) == posted["num_steps"] == (sizes["web"] + 2 * sizes["mixed"]) // 24
        rows = Counter(tuple(row) for batch in loader for row in batch.tokens.tolist())
    for name, epochs in EPOCHS.items():
        known = windows(corpora[name])
        seen = {row: rows[row] for row in known}
        asked = epochs * sizes[name]
        assert asked - 24 - ROWS <= sum(seen.values()) <= asked + ROWS
        assert posted["planned"][name]["rows"] == sum(seen.values())
        # No window a third time, or a second one of `web`, but for the rows by which the share was missed.
        assert sum(max(0, seen[row] - epochs * known[row]) for row in known) <= ROWS
    assert sum(rows.values()) == 24 * posted["num_steps"]


def test_the_plan_is_one_of_weights(server: RunningServer) -> None:
    """It can be posted again anywhere; what is planned is said beside what was used."""
    posted = server.post_plan(DOCUMENT).json()
    again = server.post_plan(posted["plan"]).json()
    assert again["id"] == posted["id"]
    assert again["num_steps"] is None
    assert "planned" not in again
    assert set(posted["plan"]["stages"][0]) == {"from_step", "global_batch_size", "mixture"}
    path = f"/v1/plans/{posted['id']}/usage"
    used = server.get(path, step=10, num_steps=posted["num_steps"]).json()
    assert used["planned"] == posted["planned"]
    assert used["planned"] == server.get(path, step=posted["num_steps"]).json()["sources"]
    assert server.get(path, step=10).json()["planned"] is None


def test_every_loader_takes_tokens_and_groups(server: RunningServer) -> None:
    """The same plan, which ends at the same step; a state goes on to that end."""
    tokens = {"all": {"share": 24 * SEQ_LEN * 10, "of": {"web": 1, "mixed": 1}}}
    with open_loader(server, tokens=tokens) as loader:
        assert len(loader) == 10
        plan_id = loader.plan_id
        for batch in loader:
            if batch.step == 6:
                break
        state = batch.state_after()
    options: dict[str, Any] = {"seq_len": SEQ_LEN, "global_batch_size": 24, "seed": 7, "tokens": tokens}
    with ArrayLoader(server.url, **options) as arrays:
        assert arrays.plan_id == plan_id
        arrays.load_state_dict(state)
        assert [batch.step for batch in arrays] == [7, 8, 9]
    dataset = CorpusIterableDataset(server.url, **options)
    assert (dataset.plan_id, len(dataset)) == (plan_id, 10)
    assert [batch.step for batch in dataset] == list(range(10))
    weights = {"all": {"share": 0.5, "of": {"web": 2, "mixed": 2}}, "text": 0.5}
    with open_loader(server, corpus=weights) as grouped:
        assert grouped.plan["stages"][0]["mixture"] == {"mixed": 0.25, "text": 0.5, "web": 0.25}


def test_a_loader_by_path_takes_epochs(corpora: dict[str, ServedCorpus], server: RunningServer) -> None:
    """Of several paths by name: the plan of a server that has the same corpora."""
    paths = {name: str(corpora[name].path) for name in EPOCHS}
    shape: dict[str, Any] = {"seq_len": SEQ_LEN, "global_batch_size": 24, "seed": 7, "device": "cpu"}
    with CorpusLoader(paths, epochs=EPOCHS, **shape) as loader:
        posted = server.post_plan(DOCUMENT).json()
        assert (loader.plan_id, len(loader)) == (posted["id"], posted["num_steps"])
        assert next(loader).step == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 2}, "epochs must be numbers by the names of corpora"),
        ({"tokens": {}}, "tokens must be numbers by the names of corpora"),
        ({"epochs": {"web": 1}, "corpus": "web"}, "corpus must be left out with epochs"),
        ({"epochs": {"web": 1}, "num_steps": 10**6}, "num_steps must be at most"),
        ({"epochs": {"web": 1}, "plan": DOCUMENT}, "plan= must come without epochs"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    server: RunningServer, arguments: dict[str, Any], message: str
) -> None:
    shape = {"seq_len": None, "global_batch_size": None, "seed": 0} if "plan" in arguments else {}
    with pytest.raises(errors.InvalidArgument, match=message):
        open_loader(server, **arguments, **shape)


def test_a_corpus_that_nobody_serves_is_named(server: RunningServer) -> None:
    """As with weights; and a check that refuses says so over HTTP."""
    unknown = {**DOCUMENT, "stages": [{"global_batch_size": 24, "epochs": {"nothing": 1}}]}
    check_problem(server.post_plan(unknown), 404, "unknown-corpus")
    problem = check_problem(server.post_plan({**DOCUMENT, "max_epochs": {"mixed": 1.5}}), 422, "invalid-plan")
    assert "which step" in problem["detail"]
    assert "raise max_epochs" in problem["remedy"]


def test_a_command_prints_the_plan(
    corpora: dict[str, ServedCorpus], server: RunningServer, tmp_path: Path
) -> None:
    """The same from a server and from the files themselves; nothing is kept."""
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**DOCUMENT, "seed": 1234567}))
    by_server = run_here("plans", "make", file, server.url)
    named = [part for name in EPOCHS for part in ("--corpus", f"{name}={corpora[name].path}")]
    by_path = run_here("plans", "make", file, *named)
    assert (by_server.returncode, by_path.returncode) == (0, 0), by_server.stderr + by_path.stderr
    assert by_server.stdout == by_path.stdout
    plan = json.loads(by_path.stdout)
    assert "the run ends at step" in by_path.stderr
    assert "web" in by_path.stderr
    whole = json.loads(run_here("plans", "make", file, server.url, "--json").stdout)
    assert whole["plan"] == plan
    assert set(whole) == {"id", "plan", "num_steps", "planned"}
    assert server.get(f"/v1/plans/{whole['id']}").status == 404
    assert server.post_plan(plan).json()["id"] == whole["id"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "name a server's URL, or each corpus with --corpus"),
        (("nowhere",), "http://host:port of a server"),
    ],
)
def test_a_command_says_what_it_lacks(tmp_path: Path, more: tuple[str, ...], message: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(DOCUMENT))
    made = run_here("plans", "make", file, *more)
    assert made.returncode == 2
    assert message in made.stderr
