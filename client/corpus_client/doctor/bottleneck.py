"""Is data the bottleneck? What a training step needs against what arrives."""

from __future__ import annotations

from dataclasses import dataclass

from corpus_client import errors
from corpus_client.doctor.findings import Check
from corpus_client.doctor.speed import STAGES, Stages

HEADROOM = 1.25
"""Below it, a step that is a little slower than usual on the way makes the GPU wait."""

CONTENDED = 0.75
"""Of the rate of one stage after the other; short measurements differ by less."""

FIXES = {
    "cores": "too much runs on these cores: give this process and its loader two of their own, and let the "
    "server run elsewhere",
    "server": "give the server more --workers (one per core), or more replicas; if the files were cold, "
    "run this again: the second time they are in its memory",
    "network": "use a faster link, or more replicas on other links; on the server's own host use uds://, and "
    "where a copy of the shards fits, source='indices' with local_root=",
    "host copy": "leave the loader a core of its own; verify=False spares the checksum, dtype=torch.int32 or "
    "None half or all of the widening on the CPU",
    "transfer": "look at the GPU's PCIe link and at what else uses it, then run `corpus-client transfer`",
}
"""What to do, by the cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What training needs.

    Args:
        tokens_per_step: of the whole run: global batch x sequence length.
        step_seconds: of a step that never waits for data; None: not known.
        world_size: ranks among which the tokens are divided.
    """

    tokens_per_step: float
    step_seconds: float | None
    world_size: int

    def __post_init__(self) -> None:
        if not self.tokens_per_step > 0:
            raise errors.InvalidArgument(f"tokens_per_step must be above 0, got {self.tokens_per_step!r}")
        if self.step_seconds is not None and not self.step_seconds > 0:
            raise errors.InvalidArgument(f"step_seconds must be above 0, got {self.step_seconds!r}")

    @property
    def rank_tokens(self) -> float:
        """Tokens that one rank needs for a step."""
        return self.tokens_per_step / self.world_size


def cause(delivered: float, stages: Stages) -> str:
    """What to look at first: the longest stage, unless all at once are slower than one after the other.

    A loader overlaps the stages. Where that makes them slower, they wait for one another's cores.
    """
    one_after_the_other = stages.num_tokens / sum(stages.seconds.values())
    if delivered < CONTENDED * one_after_the_other:
        return "cores"
    return max(STAGES, key=lambda name: stages.seconds[name]).replace("_", " ")


def diagnose(delivered: float, stages: Stages, demand: Demand) -> Check:
    """Answer for one rank.

    Args:
        delivered: trained tokens per second that a loader brought here.
    """
    slowest = cause(delivered, stages)
    shortest = demand.rank_tokens / delivered
    measured = {
        "delivered_tokens_per_second": delivered,
        "cause": slowest,
        "shortest_step_seconds": shortest,
        **{
            f"{name}_tokens_per_second": stages.tokens_per_second(name)
            for name, seconds in stages.seconds.items()
            if seconds > 0
        },
    }
    if demand.step_seconds is None:
        return Check(
            name="bottleneck",
            status="ok",
            found=f"data keeps up with steps of {_ms(shortest)} or longer ({demand.rank_tokens:,.0f} tokens "
            f"a rank); below that, {slowest} sets the pace",
            advice="is data the bottleneck? say how long a step takes with --step-seconds",
            measured=measured,
        )
    needed = demand.rank_tokens / demand.step_seconds
    measured |= {"needed_tokens_per_second": needed, "delivered_over_needed": delivered / needed}
    rates = f"a rank needs {_rate(needed)}, {_rate(delivered)} arrive ({_times(delivered / needed)})"
    if delivered >= HEADROOM * needed:
        return Check(name="bottleneck", status="ok", found=f"data is not: {rates}", measured=measured)
    if delivered >= needed:
        return Check(
            name="bottleneck",
            status="warn",
            found=f"data hardly keeps up: {rates}; the cause is {slowest}",
            advice=FIXES[slowest],
            measured=measured,
        )
    return Check(
        name="bottleneck",
        status="fail",
        found=f"data is: {rates}, so a step of {_ms(demand.step_seconds)} takes {_ms(shortest)}; "
        f"the cause is {slowest}",
        advice=FIXES[slowest],
        measured=measured,
    )


def servers_for_all(stages: Stages, demand: Demand, num_servers: int) -> Check | None:
    """What all ranks together ask of the servers; None where that cannot be said.

    As where batches are so small that the server has them ready when they are asked for.
    """
    if demand.step_seconds is None or demand.world_size == 1 or not stages.server:
        return None
    needed = demand.tokens_per_step / demand.step_seconds
    one = stages.tokens_per_second("server")
    workers = needed / one
    enough = workers <= num_servers
    return Check(
        name="all ranks",
        status="ok" if enough else "warn",
        found=f"{demand.world_size} ranks need {_rate(needed)}; one server process gathers {_rate(one)}, "
        f"so it takes {workers:.2g} of them",
        advice=""
        if enough
        else f"see to it that --workers over all replicas are {workers * HEADROOM:.0f} or more, "
        "and that their network carries it; run this on several nodes at once",
        measured={"needed_tokens_per_second": needed, "server_processes": workers},
    )


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second / 1e6:,.3g} M tokens/s"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times that" if ratio < 10 else f"{ratio:,.0f} times that"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g} ms"
