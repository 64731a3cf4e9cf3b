"""What threads have spent on reading: each counts for itself, and the sums keep those that have ended."""

from __future__ import annotations

import threading

import pytest

from corpus_server.read.timing import OF_THREAD, total

NAMES = ("locate_seconds", "num_reads", "num_cold_reads", "num_faults")


@pytest.mark.parametrize(
    ("faults", "counted"),
    [([], (0, 0, 0)), ([0], (1, 0, 0)), ([1], (1, 1, 1)), ([0, 3, 0, 1], (4, 2, 4))],
    ids=str,
)
def test_a_thread_counts_its_own_reads_and_the_sums_keep_them(
    faults: list[int], counted: tuple[int, int, int]
) -> None:
    before = [total(name) for name in NAMES]
    own: list[float] = []

    def work() -> None:
        for num_faults in faults:
            OF_THREAD.count_read(num_faults)
        own.extend(getattr(OF_THREAD, name) for name in NAMES)
        OF_THREAD.locate_seconds += 0.5

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert own == [0.0, *counted]
    added = [total(name) - was for name, was in zip(NAMES, before, strict=True)]
    assert added == pytest.approx([0.5, *counted])
