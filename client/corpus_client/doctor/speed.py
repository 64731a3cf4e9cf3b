"""How fast servers answer, what a loader brings to this process, and whether a training step needs more."""

from __future__ import annotations

from dataclasses import asdict

import torch

from corpus_client.doctor.findings import Check
from corpus_client.network.control import ControlPlane
from corpus_client.observe.attribution import LoaderStats
from corpus_client.tools.bench import BenchResult
from corpus_client.tools.timing import Clock, seconds_name

REQUESTS = 100  # of each kind to measure latency, fewer if they take longer than two seconds
FAR_SECONDS = 0.01  # a round trip beyond which two requests on the wire no longer hide the way
HEADROOM = 1.25  # below it, a step that is a little slower than usual on the way makes the GPU wait

FIXES = {
    "server": "give the server more --workers (one per core), or more replicas; if the files were cold, "
    "run this again: the second time they are in its memory",
    "network": "use a faster link, or more replicas on other links; on the server's own host use uds://, and "
    "where a copy of the shards fits, read it instead of receiving tokens (local_root)",
    "host": "leave the loader a core of its own, and let the server run elsewhere; verify=False spares the "
    "checksum, dtype=torch.int32 or None half or all of the widening on the CPU",
    "transfer": "look at the GPU's PCIe link and at what else uses it, then run `corpus-client transfer`",
    "retry": "look at the server's log: requests failed and were repeated after a pause",
}
"""What to do, by the cause of a loader's waits (`WaitSeconds`)."""


def latency(control: ControlPlane, corpus: str, num_tokens: int) -> Check:
    """Measure round trips, unloaded: of nothing, and of one row of tokens.

    They go over the control plane's connection, whose HTTP library costs some tenths of a millisecond.
    """
    clock = Clock(torch.device("cpu"))
    alive, _ = clock.time(lambda: control.get("/healthz"), repeats=REQUESTS)
    row, _ = clock.time(lambda: control.tokens(corpus, 0, num_tokens), repeats=REQUESTS)
    url, far = control.endpoint.url, alive.median > FAR_SECONDS
    shown = [seconds_name(each) for each in (alive.median, alive.p99, row.median, row.p99)]
    found = f"{url}: /healthz {shown[0]}, {shown[1]}; {num_tokens} tokens {shown[2]}, {shown[3]} (p50, p99)"
    advice = "the server is far away: keep more requests on the wire with in_flight=" if far else ""
    measured = {"url": url, "healthz_seconds": asdict(alive), "row_seconds": asdict(row)}
    return Check("latency", "warn" if far else "ok", found, advice, measured)


def bandwidth(found: BenchResult) -> Check:
    """Report a short run of a loader: data must arrive without being asked for twice."""
    stats, waits = found.stats, asdict(found.stats.wait)
    waited = sum(waits.values()) or 1.0
    causes = ", ".join(f"{name} {each / waited:.0%}" for name, each in waits.items() if each)
    again = f", {stats.num_retries} requests repeated" if stats.num_retries else ""
    rates = f"{_rate(stats.tokens_per_second)}, {found.bytes_per_second / 1e6:,.0f} MB/s{again}"
    text = f"{rates}; the loop waited for {causes or 'nothing'}"
    advice = FIXES["retry"] if again else ""
    return Check("bandwidth", "warn" if again else "ok", text, advice, found.as_json())


def bottleneck(stats: LoaderStats, rank_tokens: float, step_seconds: float | None) -> Check:
    """Answer for one rank, which needs `rank_tokens` for a step: is data the bottleneck?

    stats: of a loader in a loop that does nothing but ask.
    step_seconds: of a step that never waits for data; None: not known.
    """
    delivered = stats.tokens_per_second
    cause = stats.wait.cause or "host"  # a loop that never waits is held by its own copy of each batch
    shortest = rank_tokens / delivered
    measured = {"delivered_tokens_per_second": delivered, "cause": cause, "shortest_step_seconds": shortest}
    if step_seconds is None:
        steps = f"steps of {seconds_name(shortest)} or longer ({rank_tokens:,.0f} tokens a rank)"
        found = f"data keeps up with {steps}; below that, {cause} sets the pace"
        advice = "is data the bottleneck? say how long a step takes with --step-seconds"
        return Check("bottleneck", "ok", found, advice, measured)
    needed = rank_tokens / step_seconds
    measured |= {"needed_tokens_per_second": needed, "delivered_over_needed": delivered / needed}
    rates = f"a rank needs {_rate(needed)}, {_rate(delivered)} arrive ({delivered / needed:.3g} times that)"
    if delivered >= HEADROOM * needed:
        return Check("bottleneck", "ok", f"data is not: {rates}", measured=measured)
    if delivered >= needed:
        found = f"data hardly keeps up: {rates}; the cause is {cause}"
        return Check("bottleneck", "warn", found, FIXES[cause], measured)
    longer = f"so a step of {seconds_name(step_seconds)} takes {seconds_name(shortest)}"
    return Check(
        "bottleneck", "fail", f"data is: {rates}, {longer}; the cause is {cause}", FIXES[cause], measured
    )


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second / 1e6:,.3g} M tokens/s"
