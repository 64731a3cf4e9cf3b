"""Batches as NumPy arrays: the same tokens as by `CorpusLoader`, in an interpreter that has no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from corpus_client import ArrayLoader, Network, errors
from tests.client.conftest import make_corpus
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step
from tests.client.reference_server import ReferenceServer
from tests.serving import wait_until

if TYPE_CHECKING:
    from corpus_client import CorpusLoader  # these tests run where there is no torch, too

SMALL: dict[str, Any] = {"corpus": "web", "seq_len": 16, "global_batch_size": 8, "seed": 3}
WITHOUT = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"


def without(names: list[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter in which these packages cannot be imported."""
    command = [sys.executable, "-c", WITHOUT.format(names=names) + code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_runs_where_torch_cannot_be_imported(server: ReferenceServer, corpus: ReferenceCorpus) -> None:
    code = (
        "import json\n"
        "from corpus_client import ArrayLoader\n"
        f"with ArrayLoader({server.url!r}, **{SMALL!r}, num_steps=5) as loader:\n"
        "    print(json.dumps([loader.plan, [batch.tokens.tolist() for batch in loader]]))\n"
    )
    done = without(["torch", "typer", "rich"], code)
    assert done.returncode == 0, done.stderr
    plan, batches = json.loads(done.stdout)
    assert batches == [tokens_of_step(corpus, plan, step).tolist() for step in range(5)]


@pytest.mark.parametrize("name", ["CorpusLoader", "get_batch", "CorpusIterableDataset", "Batch"])
def test_without_torch_what_needs_it_says_so_in_a_sentence(name: str) -> None:
    done = without(["torch"], f"from corpus_client import {name}")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"ImportError: {name} needs torch, which is not installed; pip install 'corpus-client"
    )
    assert "ArrayLoader" in last


@pytest.mark.parametrize(
    ("missing", "command", "what", "extras"),
    [
        (["rich"], "bill", "rich, which is", "tools"),
        (["torch"], "bench", "torch, which is", "torch"),
        (["typer", "torch"], "doctor", "typer, torch, which are", "tools,torch"),
        (["typer", "torch"], "bill", "typer, which is", "tools"),
    ],
)
def test_the_command_without_its_extras_names_all_of_them(
    missing: list[str], command: str, what: str, extras: str
) -> None:
    code = f"import sys; sys.argv = ['', {command!r}]; from corpus_client.__main__ import main; main()"
    done = without(missing, code)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: corpus-client needs {what} not installed; pip install 'corpus-client[{extras}]'\n"
    )


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32"])
def test_every_stored_dtype_arrives_as_it_is(dtype: str) -> None:
    corpus = make_corpus(dtype=dtype)
    with ReferenceServer([corpus]) as server, ArrayLoader(server.url, **SMALL, num_steps=3) as loader:
        for batch in loader:
            expected = tokens_of_step(corpus, loader.plan, batch.step)
            inputs, targets = batch
            assert batch.tokens.dtype == expected.dtype
            assert np.array_equal(batch.tokens, expected)
            assert np.array_equal(inputs, expected[:, :-1])
            assert np.array_equal(targets, expected[:, 1:])


def test_ranks_make_up_the_global_batch(server: ReferenceServer, corpus: ReferenceCorpus) -> None:
    loaders = [ArrayLoader(server.url, **SMALL, rank=rank, world_size=4, num_steps=3) for rank in range(4)]
    for step, parts in enumerate(zip(*loaders, strict=True)):
        whole = np.concatenate([part.tokens for part in parts])
        assert np.array_equal(whole, tokens_of_step(corpus, loaders[0].plan, step))
    for loader in loaders:
        loader.close()


def test_a_batch_that_is_kept_is_not_overwritten(server: ReferenceServer) -> None:
    with ArrayLoader(server.url, **SMALL, num_steps=600) as loader:
        kept = [(batch.tokens, batch.tokens.copy()) for batch in loader]
    assert len(kept) == 600  # three requests
    assert all(np.array_equal(tokens, copy) for tokens, copy in kept)


def test_either_loader_resumes_the_others_state(
    server: ReferenceServer, make_loader: Callable[..., CorpusLoader]
) -> None:
    theirs = make_loader(**SMALL, order="shuffle")
    with ArrayLoader(server.url, **SMALL) as loader:
        first = [batch.step for batch in islice(loader, 7)]
        theirs.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert [batch.step for batch in islice(theirs, 3)] == [7, 8, 9]
        loader.load_state_dict({**loader.state_dict(), "next_step": 2})
        assert [batch.step for batch in islice(loader, 3)] == [2, 3, 4]
        with pytest.raises(errors.StateMismatch, match="seed"):
            loader.load_state_dict({**loader.state_dict(), "plan": {**loader.plan, "seed": 4}})
    assert first == list(range(7))


def test_the_state_after_a_batch_does_not_count_what_is_held(server: ReferenceServer) -> None:
    with ArrayLoader(server.url, **SMALL) as loader:
        batches = list(islice(loader, 5))
        assert [batch.state_after() for batch in batches] == [loader.state_at(step) for step in range(1, 6)]


def test_a_replica_that_goes_away_is_ridden_out(corpus: ReferenceCorpus) -> None:
    with ReferenceServer([corpus]) as stays:
        leaving = ReferenceServer([corpus])
        leaving.start()
        big = {**SMALL, "seq_len": 1000, "global_batch_size": 64}  # few steps a request, so there are many
        with ArrayLoader([leaving.url, stays.url], **big, num_steps=120) as loader:
            steps = []
            for batch in loader:
                steps.append(batch.step)
                if batch.step == 40:
                    leaving.stop()
                assert np.array_equal(batch.tokens, tokens_of_step(corpus, loader.plan, batch.step))
    assert steps == list(range(120))


def test_nobody_there_is_an_error_and_the_step_is_not_lost(corpus: ReferenceCorpus) -> None:
    server = ReferenceServer([corpus])
    server.start()
    loaders: list[ArrayLoader] = []

    def made() -> bool:
        with suppress(errors.DeadlineExceeded):  # on a busy machine
            loaders.append(ArrayLoader(server.url, **SMALL, network=Network(deadline_seconds=0.3)))
        return bool(loaders)

    wait_until(made)
    [loader] = loaders
    server.stop()
    for _ in range(2):
        with pytest.raises(errors.DeadlineExceeded):
            next(loader)
    server.start()
    steps: list[int] = []

    def comes() -> bool:
        with suppress(errors.DeadlineExceeded):  # on a busy machine
            steps.append(next(loader).step)
        return bool(steps)

    wait_until(comes)
    assert steps == [0]
    loader.close()
    server.stop()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 0}, "seq_len must be an integer in"),
        ({"rank": 1}, "rank and world_size must be given together"),
        ({"network": {}}, "network must be a Network, got a dict"),
        ({"sources": "no"}, "sources must be True or False, got 'no'"),
        ({"reiterable": 1}, "reiterable must be True or False, got 1"),
        ({"world_size": 3, "rank": 0}, "must be divisible by world_size"),
    ],
)
def test_wrong_arguments_are_refused(server: ReferenceServer, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        ArrayLoader(server.url, **{**SMALL, **changes})
