"""Row 4 of the reliability catalogue: a resume yields the next batch and no other."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import ServedCorpus
from tests.contract.conftest import Replicas, make_loader, take

NUM_STEPS = 120
STEPS = st.integers(0, NUM_STEPS - 40)


def _undisturbed(urls: list[str]) -> list[np.ndarray]:
    with make_loader(urls) as loader:
        return [tokens for _, tokens in take(loader, NUM_STEPS)]


def _same(taken: list[tuple[int, np.ndarray]], expected: list[np.ndarray], start: int) -> None:
    assert [step for step, _ in taken] == list(range(start, start + len(taken)))
    for step, tokens in taken:
        np.testing.assert_array_equal(tokens, expected[step])


def test_a_resume_at_any_step_goes_on_exactly(replicas: Replicas) -> None:
    """Also a second resume, another prefetch depth, other servers and with batches in flight."""
    expected = _undisturbed(replicas["1 worker"])

    @settings(max_examples=25, deadline=None)
    @given(
        start=STEPS, first=st.integers(0, 20), second=st.integers(1, 20), depth=st.sampled_from([1, 4, 64])
    )
    def resumed(start: int, first: int, second: int, depth: int) -> None:
        with make_loader(replicas["4 workers"], start_step=start, prefetch_bytes=depth << 16) as loader:
            _same(take(loader, first), expected, start)
            saved = json.loads(json.dumps(loader.state_dict()))
        assert saved["next_step"] == start + first
        with make_loader(replicas["3 replicas"], prefetch_bytes=depth << 17) as loader:
            loader.load_state_dict(saved)
            _same(take(loader, second), expected, start + first)
            loader.seek(start)
            _same(take(loader, second), expected, start)

    resumed()


def test_an_early_break_loses_nothing(replicas: Replicas) -> None:
    expected = _undisturbed(replicas["1 worker"])
    with make_loader(replicas["1 worker"]) as loader:
        seen = []
        while len(seen) < 60:
            for batch in loader:
                seen.append((batch.step, batch.tokens.numpy().copy()))
                if batch.step % 7 == 3:
                    break
    _same(seen, expected, 0)


def test_a_resume_at_the_end_of_an_epoch_begins_the_next(
    corpora: dict[str, ServedCorpus], replicas: Replicas
) -> None:
    """Epochs need not end with a step: the step that straddles two is the same after a resume."""
    num_windows = sum((len(shard) - 17) // 16 + 1 for shard in corpora["web"].shards)
    assert num_windows % 10 != 0
    with make_loader(replicas["1 worker"], global_batch_size=10) as loader:
        taken = take(loader, 2 * num_windows // 10 + 2)
    rows = [tuple(row) for _, tokens in taken for row in tokens.tolist()]
    first, second = rows[:num_windows], rows[num_windows : 2 * num_windows]
    assert len(set(first)) == num_windows
    assert set(first) == set(second)
    assert first != second
    for step in (num_windows // 10, num_windows // 10 + 1):
        with make_loader(replicas["1 worker"], global_batch_size=10) as loader:
            loader.seek(step)
            ((resumed_at, tokens),) = take(loader, 1)
        assert resumed_at == step
        np.testing.assert_array_equal(tokens, taken[step][1])
