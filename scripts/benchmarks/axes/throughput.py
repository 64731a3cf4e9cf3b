"""Delivered tokens per second and the CPU they cost, at a small and a large batch.

Everybody delivers batches of sampled windows of the same corpus of 10^9 uint16 tokens, which lies in the
page cache, into a torch tensor of one consumer, this process; contenders and limits are described where
they are (`contenders.py`, `peers/`). The first batches of each are compared with the corpus before
anything is timed. Ratios are of one round, in which every contender has its turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from scripts.benchmarks import contenders as them
from scripts.benchmarks import corpus, plotting
from scripts.benchmarks.contender import Shape, check
from scripts.benchmarks.measure import Series, paired_ratios
from scripts.benchmarks.measure import measure as measure_series
from scripts.benchmarks.report import Options, Plot, Report, Table, Target

HELP = "tokens per second and CPU per token, beside limits and peers"

SHAPES = (Shape(rows=64, length=1025), Shape(rows=512, length=2049))
SMOKE_SHAPES = (Shape(rows=16, length=129), Shape(rows=32, length=257))
NUM_TOKENS, SMOKE_TOKENS = 10**9, 200_000

SPEED, CPU = "tokens_per_second", "cpu_seconds_per_billion"
AHEAD = {them.GRPC: 1.0, them.FLIGHT: 1.0, them.NANOGPT: 8.0}
"""Ours is to deliver at least so many times their tokens per second."""
OF_LIMIT, CPU_OF_LIMIT = 0.85, 1.3


def measure(options: Options) -> Report:
    """Measure all contenders at all shapes."""
    options = options.in_force()
    path = corpus.make(options.cache, SMOKE_TOKENS if options.smoke else NUM_TOKENS)
    corpus.warm(path)
    shapes = {}
    with them.servers(path) as at:
        for shape in SMOKE_SHAPES if options.smoke else SHAPES:
            with them.contenders(path, shape, at) as everybody:
                for contender in everybody:
                    check(contender, path, shape)
                series = measure_series(everybody, shape, rounds=options.rounds, seconds=options.seconds)
            shapes[str(shape)] = _figures(series)
    return report_of({"rounds": options.rounds, "seconds": options.seconds, "shapes": shapes})


def report_of(data: dict[str, Any]) -> Report:
    """Return the views of what was measured."""
    tables, targets = [], []
    for shape, figures in data["shapes"].items():
        tables += [_contender_table(shape, figures, data["rounds"]), _ratio_table(shape, figures)]
        targets += _targets(shape, figures)
    return Report(
        data=data,
        tables=tables,
        targets=targets,
        plots=[
            Plot(name="throughput", draw=partial(_draw, data, "million_tokens_per_second")),
            Plot(name="cpu", draw=partial(_draw, data, "cpu_seconds_per_billion_tokens")),
        ],
    )


def _figures(series: Mapping[str, Series]) -> dict[str, Any]:
    """Every contender by itself, and the ratios that matter, (of, to, figure) each."""

    def best(names: tuple[str, ...]) -> str:
        return max(names, key=lambda name: series[name].summary()["million_tokens_per_second"]["median"])

    tcp, unix = best(them.TCP_LIMITS), best(them.UNIX_LIMITS)
    others = [name for name in series if not name.startswith(them.OURS)]
    pairs = [(them.OURS, name, SPEED) for name in others]
    pairs += [(them.INDICES, them.GATHER, SPEED), (them.OURS, tcp, CPU)]
    pairs += [(them.UDS, unix, SPEED), (them.UDS, unix, CPU)]
    return {
        "contenders": {name: its.summary() for name, its in series.items()},
        "limits": {"tcp": tcp, "unix": unix},
        "ratios": [
            {
                "of": of,
                "to": to,
                "figure": figure,
                **paired_ratios(getattr(series[of], figure), getattr(series[to], figure)),
            }
            for of, to, figure in pairs
        ],
    }


def _targets(shape: str, figures: dict[str, Any]) -> list[Target]:
    ratios = {(each["of"], each["to"], each["figure"]): each["median"] for each in figures["ratios"]}
    tcp, unix = figures["limits"]["tcp"], figures["limits"]["unix"]

    def target(of: str, to: str, wanted: float, figure: str = SPEED) -> Target:
        what = "tokens/s" if figure == SPEED else "CPU per token"
        return Target(
            figure=f"{shape}: {what}, {of} / {to}",
            reached=ratios[of, to, figure],
            bound="at least" if figure == SPEED else "at most",
            wanted=wanted,
        )

    return [
        target(them.OURS, tcp, OF_LIMIT),
        target(them.OURS, tcp, CPU_OF_LIMIT, CPU),
        *(target(them.OURS, peer, wanted) for peer, wanted in AHEAD.items()),
        target(them.INDICES, them.GATHER, OF_LIMIT),
        target(them.UDS, unix, OF_LIMIT),
    ]


def _contender_table(shape: str, figures: dict[str, Any], rounds: int) -> Table:
    rows = []
    for name, its in figures["contenders"].items():
        speed, cpu = its["million_tokens_per_second"], its["cpu_seconds_per_billion_tokens"]
        rows.append(
            [
                name,
                f"{speed['median']:,.0f}",
                f"{speed['lowest']:,.0f} - {speed['highest']:,.0f}",
                f"{cpu['median']:.2f}",
                f"{cpu['lowest']:.2f} - {cpu['highest']:.2f}",
                f"{its['p50_ms']:.2f}",
                f"{its['p99_ms']:.2f}",
            ]
        )
    return Table(
        title=f"{shape} uint16, median of {rounds} rounds",
        columns=["contender", "M tokens/s", "spread", "CPU s / 10^9", "spread", "batch p50 ms", "p99 ms"],
        rows=rows,
    )


def _ratio_table(shape: str, figures: dict[str, Any]) -> Table:
    return Table(
        title=f"{shape}: ratios round by round",
        columns=["", "to", "of", "ratio", "spread"],
        rows=[
            [
                each["of"],
                each["to"],
                "tokens/s" if each["figure"] == SPEED else "CPU per token",
                f"{each['median']:.2f}",
                f"{each['lowest']:.2f} - {each['highest']:.2f}",
            ]
            for each in figures["ratios"]
        ],
    )


def _role(name: str) -> plotting.Role:
    if name.startswith(them.OURS):
        return "ours"
    return "limit" if name in (*them.TCP_LIMITS, *them.UNIX_LIMITS, them.GATHER) else "peer"


def _draw(data: dict[str, Any], figure_name: str, figure: Figure) -> None:
    fast = figure_name == "million_tokens_per_second"
    figure.set_size_inches(12, 5.6)
    figure.suptitle(
        "Delivered tokens per second (more is better)"
        if fast
        else "CPU of consumer and server per $10^9$ delivered tokens (less is better)",
        fontsize=14,
    )
    panels = figure.subplots(1, len(data["shapes"]))
    for panel, (shape, figures) in zip(panels, data["shapes"].items(), strict=True):
        its = {name: each[figure_name] for name, each in figures["contenders"].items()}
        names = sorted(its, key=lambda name: its[name]["median"], reverse=fast)
        spreads = [(its[name]["lowest"], its[name]["highest"]) for name in names]
        medians = [its[name]["median"] for name in names]
        roles = [_role(name) for name in names]
        plotting.bars(panel, names, medians, spreads, roles, form=",.0f" if fast else ".2f")
        panel.set_title(f"batches of {shape} uint16 tokens", fontsize=11)
        panel.set_xlabel("million tokens/s" if fast else "CPU seconds per $10^9$ tokens")
    handles = [Patch(color=plotting.COLOURS[role], label=label) for role, label in plotting.LABELS.items()]
    plotting.spread_panels(figure)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
