"""What docs/scale.md asks of the simulation: how many replicas, how late, and what a fault costs the job."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from matplotlib.figure import Figure

from scripts.benchmarks.report import Report, Table
from scripts.scale_lib import measured
from scripts.scale_lib.model import KILLED, SILENT, Cluster, Faults, Job, Outcome, Simulation

PACES = {"1 step/s": 1.0, "10 steps/s": 0.1}
JOINED = (1, 8, 64)
"""Steps per request: what a loader's `prefetch_bytes` of 4 requests allows."""

BURSTS = (1, 2, 4, 8, 16)
FAULTS = {
    "none": Faults(),
    "a replica is killed": Faults(lost=KILLED),
    "a host falls silent": Faults(lost=SILENT),
    "a replica restarts with a cold cache": Faults(cold=1),
    "its disk is 20 times slower, too": Faults(cold=1, disk_factor=20.0),
    "all caches are cold": Faults(cold=10**6),
}
FAULT_AT = 4  # in requests of a rank
FAULT_JOBS = ((2, 1), (measured.NUM_SLOTS, 1), (measured.NUM_SLOTS, 8))
"""Slots of a loader and steps of a request: the smallest budget, the usual slots, and eight times as much."""
MOST_REPLICAS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Say what to simulate; see `model`."""

    job: Job
    cluster: Cluster
    faults: Faults = FAULTS["none"]
    requests: int = 9
    """Of each rank, the first four of which do not count."""

    def outcome(self) -> Outcome:
        """Simulate it."""
        joined = self.job.steps_per_request
        faults = dataclasses.replace(self.faults, at_step=FAULT_AT * joined)
        return Simulation(self.job, self.cluster, faults).run(self.requests * joined, warm=4 * joined)


def _outcome(scenario: Scenario) -> Outcome:
    return scenario.outcome()


def run_all(ranks: int) -> Report:
    """Simulate every scenario with so many ranks, two at a time."""
    with ProcessPoolExecutor(2) as pool:

        def outcomes(scenarios: list[Scenario]) -> list[Outcome]:
            return list(pool.map(_outcome, scenarios))

        needed, replicas = _needed(ranks, outcomes)
        bursts, burst_data = _bursts(ranks, outcomes)
        faults, fault_data = _faults(ranks, replicas[PACES["10 steps/s"], 8] + 1, outcomes)
        admission = _admission(ranks, outcomes)
    data = {"bursts": burst_data, "faults": fault_data}
    plots: Mapping[str, Callable[[Figure], None]] = {
        "scale-simulation": lambda figure: _draw(figure, burst_data, fault_data)
    }
    return Report(data=data, tables=[needed, bursts, faults, admission], plots=dict(plots))


Outcomes = Callable[[list[Scenario]], list[Outcome]]


def _needed(ranks: int, outcomes: Outcomes) -> tuple[Table, dict[tuple[float, int], int]]:
    """Find the least replicas with which no step waits, for each pace and length of requests."""
    rows, found = [], {}
    for name, seconds in PACES.items():
        for joined in JOINED:
            job = Job(ranks=ranks, step_seconds=seconds, steps_per_request=joined)
            least = least_replicas(job)
            while True:
                (outcome,) = outcomes([Scenario(job=job, cluster=Cluster(replicas=least))])
                if not outcome.stalls.any() or least >= MOST_REPLICAS:
                    break
                least += 1
            found[seconds, joined] = least
            budget = measured.NUM_SLOTS * job.request_bytes / 2**20
            rows.append(
                [
                    *(name, str(joined), f"{budget:.3g}", f"{ranks * job.batch_bytes / seconds / 1e9:.2f}"),
                    *(str(least), str(least + 1), f"{outcome.busy:.0%}"),
                    *(f"{outcome.percentile(99):.3f}", f"{ahead_seconds(job):.3g}"),
                    f"{outcome.first_batch_seconds:.2f}",
                ]
            )
    columns = [
        *("pace", "steps per request", "prefetch MiB", "GB/s", "replicas", "and one spare", "processes busy"),
        *("p99 s", "fetched ahead s", "first batch s"),
    ]
    return Table(title=f"replicas for {ranks:,} ranks in step", columns=columns, rows=rows), found


def least_replicas(job: Job, workers: int = 8) -> int:
    """Return how many replicas have the CPU and the links for the mean load."""
    requests_per_second = job.ranks / job.step_seconds / job.steps_per_request
    processes = requests_per_second * measured.request_seconds(job.request_bytes)
    links = requests_per_second * job.request_bytes / Cluster().link_bytes_per_second
    return max(1, math.ceil(processes / workers), math.ceil(links))


def ahead_seconds(job: Job) -> float:
    """Return how long a job goes on without a response: the steps of all slots but the refilled one."""
    return (job.slots - 1) * job.steps_per_request * job.step_seconds


def _bursts(ranks: int, outcomes: Outcomes) -> tuple[Table, dict[int, list[float]]]:
    """Let all ranks ask within 10 ms."""
    scenarios = [Scenario(job=Job(ranks=ranks), cluster=Cluster(replicas=each)) for each in BURSTS]
    data = {
        each: [1e3 * outcome.percentile(share) for share in (50, 99, 100)]
        for each, outcome in zip(BURSTS, outcomes(scenarios), strict=True)
    }
    rows = [[str(each), *(f"{value:,.0f}" for value in values)] for each, values in data.items()]
    title = f"{ranks:,} ranks ask for {measured.REQUEST_BYTES:,} bytes each within 10 ms"
    return Table(title=title, columns=["replicas", "p50 ms", "p99 ms", "last ms"], rows=rows), data


def _faults(ranks: int, replicas: int, outcomes: Outcomes) -> tuple[Table, dict[str, list[float]]]:
    """Let something fail while 10 steps a second are trained."""
    jobs = [
        Job(ranks=ranks, step_seconds=0.1, slots=slots, steps_per_request=joined)
        for slots, joined in FAULT_JOBS
    ]
    # Two more than the mean load needs: one may fail, and one is to spare. Otherwise the job would wait for
    # want of CPU, and the fault would not be what one sees.
    clusters = [Cluster(replicas=max(replicas, least_replicas(job) + 2)) for job in jobs]
    scenarios = [
        Scenario(job=job, cluster=cluster, faults=faults, requests=14)
        for faults in FAULTS.values()
        for job, cluster in zip(jobs, clusters, strict=True)
    ]
    results = iter(outcomes(scenarios))
    rows, data = [], {}
    for name in FAULTS:
        each = [next(results) for _ in jobs]
        data[name] = [float(outcome.stalls.sum()) for outcome in each]
        longest = [float(outcome.stalls.max()) for outcome in each]
        cells = [f"{total:.2f} ({most:.2f})" for total, most in zip(data[name], longest, strict=True)]
        rows.append([name, *cells])
    columns = ["fault"] + [
        f"{job.steps_per_request} a request: {ahead_seconds(job):.1f} s ahead, {cluster.replicas} replicas"
        for job, cluster in zip(jobs, clusters, strict=True)
    ]
    title = (
        "seconds that the whole job waits in ten requests after a fault, and the longest wait, at 10 steps/s"
    )
    return Table(title=title, columns=columns, rows=rows), data


def _admission(ranks: int, outcomes: Outcomes) -> Table:
    """Compare the default number of responses in flight with smaller ones."""
    slots = (64, 512, measured.MAX_CONCURRENT_ANSWERS)
    job, replicas = Job(ranks=ranks), 3
    results = outcomes([Scenario(job=job, cluster=Cluster(replicas=replicas, slots=each)) for each in slots])
    rows = [
        [
            *(str(each), f"{outcome.num_refused:,}", f"{outcome.percentile(99):.3f}"),
            f"{outcome.stalls.max():.2f}",
        ]
        for each, outcome in zip(slots, results, strict=True)
    ]
    columns = ["max_concurrent_answers", "refused", "p99 s", "longest wait of the job s"]
    return Table(title=f"admission: {replicas} replicas, 1 step/s", columns=columns, rows=rows)


def _draw(figure: Figure, bursts: Mapping[int, list[float]], faults: Mapping[str, list[float]]) -> None:
    """Draw bursts against replicas, and the longest waits that faults cause."""
    figure.set_size_inches(12, 4.5)
    left, right = figure.subplots(1, 2)
    for number, name in enumerate(("p50", "p99", "last")):
        values = [each[number] for each in bursts.values()]
        left.loglog(list(bursts), values, marker="o", label=name)
    left.set_xticks(list(bursts), [str(each) for each in bursts])
    left.minorticks_off()
    left.set_xlabel("replicas of 8 processes")
    left.set_ylabel("ms")
    left.set_title("all ranks ask within 10 ms", fontsize=11)
    left.legend(frameon=False)
    left.grid(alpha=0.3)
    height = 0.8 / len(FAULT_JOBS)
    for number, (slots, joined) in enumerate(FAULT_JOBS):
        places = [place + number * height for place in range(len(faults))]
        ahead = ahead_seconds(Job(step_seconds=0.1, slots=slots, steps_per_request=joined))
        waits = [each[number] for each in faults.values()]
        right.barh(places, waits, height, label=f"{ahead:.1f} s fetched ahead")
        for place, wait in zip(places, waits, strict=True):
            right.text(wait, place, f" {wait:.2f}", va="center", fontsize=7)
    right.set_yticks([place + height for place in range(len(faults))], list(faults), fontsize=9)
    right.invert_yaxis()
    right.set_xlabel("seconds that the job waits in ten requests (10 steps/s)")
    right.set_title("what a fault costs", fontsize=11)
    right.legend(frameon=False)
    for axes in (left, right):
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
