"""The simulation of large jobs: seeded, right where the answer is known, built on measured figures."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from corpus_client.network import replicas
from corpus_client.staging import slots
from corpus_server.errors import Overloaded
from corpus_server.settings import all_settings
from scripts.scale_lib import measured
from scripts.scale_lib.model import KILLED, SILENT, Cluster, Faults, Job, Simulation
from tests.serving import ROOT

RESULTS = ROOT / "scripts" / "results"
JOB = Job(ranks=200, step_seconds=0.5, spread_seconds=0.001)
WIDE = 1e15  # bytes per second


def result(name: str) -> str:
    """Return the newest result of an axis of the bench."""
    return sorted(RESULTS.glob(f"*-bench-{name}.md"))[-1].read_text()


def test_the_service_times_are_in_the_results_that_they_name() -> None:
    """The newest results may have others, within the machine's spread of a third."""
    (line,) = (each for each in result("paced").splitlines() if each.startswith("| ours, in step |"))
    per_token = float(line.split("|")[-2].split()[0]) * 1e-9
    assert pytest.approx(per_token * 16 * 1025, rel=0.5) == measured.REQUEST_CPU_SECONDS
    lines = result("cold").splitlines()
    cold = [
        float(each.split("|")[2].split()[0].replace(",", "")) for each in lines if each.startswith("| ours |")
    ]
    assert pytest.approx(cold[1] * 2 * 2049, rel=0.5) == measured.COLD_BYTES_PER_SECOND


def test_the_rules_are_those_of_server_and_client() -> None:
    (limit,) = (each.default for each in all_settings() if each.name == "max_concurrent_answers")
    assert int(limit) == measured.MAX_CONCURRENT_ANSWERS
    assert Overloaded.retry_after_seconds == measured.RETRY_AFTER_SECONDS
    assert replicas.STALL_SECONDS == measured.STALL_SECONDS
    assert slots.REQUEST_BYTES == measured.MAX_REQUEST_BYTES
    size = slots.choose_slot_sizes(
        batch_bytes=measured.REQUEST_BYTES, prefetch_bytes=2**20, in_flight=measured.IN_FLIGHT
    )
    assert size.num_slots == measured.NUM_SLOTS


def test_the_same_seed_gives_the_same_run() -> None:
    first, again, other = (Simulation(JOB, Cluster(), seed=seed).run(8).latencies for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_burst_on_one_process_is_worked_off_one_by_one() -> None:
    """The last of n requests waits for n service times; the median for half of them."""
    cluster = Cluster(workers=1, cpu_seconds=0.001, link_bytes_per_second=WIDE)
    seen = Simulation(JOB, cluster).run(10)
    assert seen.latencies.max() == pytest.approx(0.2, rel=0.15)
    assert seen.percentile(50) == pytest.approx(0.1, rel=0.15)
    shared = Simulation(JOB, dataclasses.replace(cluster, cores=2, client_seconds=1e-9)).run(10)
    assert shared.percentile(50) == pytest.approx(seen.percentile(50), rel=0.1)


def test_shared_cores_do_as_much_work_as_they_have_time() -> None:
    """Two replicas whose clients work as long as they do gain nothing on two cores."""
    cluster = Cluster(
        workers=1, cores=2, cpu_seconds=5e-4, client_seconds=5e-4, clients=8, link_bytes_per_second=WIDE
    )
    one, two = (Simulation(JOB, dataclasses.replace(cluster, replicas=each)).run(10) for each in (1, 2))
    assert one.latencies.max() == pytest.approx(0.1, rel=0.2)
    assert two.latencies.max() == pytest.approx(0.1, rel=0.2)


def test_the_link_bounds_large_responses() -> None:
    job = dataclasses.replace(JOB, batch_bytes=10**6)
    cluster = Cluster(cpu_seconds=1e-6, link_bytes_per_second=1e9)
    assert Simulation(job, cluster).run(10).latencies.max() == pytest.approx(0.2, rel=0.1)


def test_more_replicas_are_faster_and_nobody_waits() -> None:
    p99 = []
    for each in (1, 2, 4):
        seen = Simulation(JOB, Cluster(replicas=each, workers=2)).run(8)
        assert not seen.stalls.any()
        p99.append(seen.percentile(99))
    assert p99[0] > 1.2 * p99[1] > 1.4 * p99[2]


def test_too_little_cpu_shows_as_waiting() -> None:
    """1 s of work for each step of half a second."""
    seen = Simulation(JOB, Cluster(workers=1, cpu_seconds=0.005)).run(12)
    assert seen.stalls[4:].mean() == pytest.approx(0.5, rel=0.2)
    assert seen.busy > 0.9


@pytest.mark.parametrize("lost", [KILLED, SILENT])
def test_a_lost_replica_is_hidden_by_what_was_fetched_ahead(lost: str) -> None:
    """A silent one is found out after a second, a killed one at once."""
    short = dataclasses.replace(JOB, step_seconds=0.02)
    for job in (JOB, short):
        seen = Simulation(job, Cluster(replicas=2), Faults(at_step=6, lost=lost)).run(14)
        assert seen.latencies.max() < 1.5
        hidden = job is JOB or lost == KILLED
        assert bool(seen.stalls.any()) != hidden


def test_a_slow_disk_is_passed_by_and_a_cold_cluster_waits() -> None:
    slow = Simulation(JOB, Cluster(replicas=2), Faults(cold=1, disk_factor=200.0)).run(12)
    alone = Simulation(JOB, Cluster(), Faults(cold=1, disk_factor=200.0)).run(12)
    assert slow.num_left > 0
    assert slow.stalls.sum() < alone.stalls.sum() / 2


def test_few_slots_refuse_and_refusals_cost_seconds() -> None:
    """At the start each of the 200 ranks asks twice."""
    few, many = (Simulation(JOB, Cluster(workers=1, slots=each)).run(8) for each in (16, 512))
    assert many.num_refused == 0 < few.num_refused
    assert few.latencies.max() > measured.RETRY_AFTER_SECONDS > many.latencies.max()
