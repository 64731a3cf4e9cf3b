"""`scripts/bench`: delivered tokens per second beside limits and habits, and what does not grow."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.benchmarks import corpus, plans, scale
from scripts.benchmarks.contenders import contenders
from scripts.benchmarks.measure import Series, measure, paired_ratio

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "bench"
SHAPES = ((64, 1025), (512, 2049))
TARGETS = {
    (512, 2049): {"bare TCP + gather, 2 in flight": 0.6, "nanoGPT idiom, in process, int64": 5.0,
                  "naive FastAPI + httpx.get().content": 2.0},
    (64, 1025): {"bare TCP + gather, 2 in flight": 0.5},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("axis", nargs="?", choices=("all", "throughput", "scale", "plans"), default="all")
    parser.add_argument("--tokens", type=int, default=10**9, help="tokens of the corpus")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="per contender and round")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="write scripts/results/DATE-bench.md")
    chosen = parser.parse_args()
    result: dict[str, object] = {"machine": machine()}
    if chosen.axis in ("all", "throughput"):
        result["throughput"] = throughput(chosen.tokens, chosen.rounds, chosen.seconds)
    if chosen.axis in ("all", "scale"):
        result["scale"] = scale.measure_scale(CACHE)
    if chosen.axis in ("all", "plans"):
        result["plans"] = plans.measure_plans(CACHE)
    if chosen.json:
        print(json.dumps(result, indent=2))
    else:
        show(result, Console())
    if chosen.save:
        path = ROOT / "scripts" / "results" / f"{datetime.date.today().isoformat()}-bench.md"
        with path.open("w") as file:
            command = " ".join(["scripts/bench", *(word for word in sys.argv[1:] if word != "--save")])
            file.write(f"# scripts/bench, {datetime.date.today().isoformat()}\n\n    {command}\n\n")
            write_markdown(result, file.write)
        print(f"saved {path.relative_to(ROOT)}")


def machine() -> dict[str, str]:
    """What the figures depend on."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), platform.processor(),
    )  # fmt: skip
    import os

    names = ("numpy", "torch", "uvicorn", "uvloop", "httptools", "fastapi")
    return {
        "cpu": f"{os.cpu_count()} x {cpu}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


def throughput(num_tokens: int, rounds: int, seconds: float) -> list[dict[str, object]]:
    """All contenders at all shapes."""
    path = corpus.make(CACHE, num_tokens)
    corpus.warm(path)
    shapes: list[dict[str, object]] = []
    for rows, length in SHAPES:
        with contenders(path, rows, length) as them:
            series = measure(them, rows, length, rounds=rounds, seconds=seconds)
        shapes.append(
            {
                "shape": f"{rows} x {length}",
                "rounds": rounds,
                "contenders": [each.summary() for each in series],
                "ratios": [ratio(series[0], other, (rows, length)) for other in series[1:]],
            }
        )
    return shapes


def ratio(ours: Series, other: Series, shape: tuple[int, int]) -> dict[str, object]:
    """Ours against another, round by round."""
    median, low, high = paired_ratio(ours, other)
    return {
        "to": other.name,
        "median": median,
        "lowest": low,
        "highest": high,
        "target": TARGETS[shape].get(other.name),
    }


def tables(result: dict[str, object]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Every table of the result: (title, columns, rows)."""
    found = []
    for shape in result.get("throughput", []):  # type: ignore[attr-defined]
        rows = [
            [
                each["name"],
                f"{each['million_tokens_per_second']:,.0f}",
                f"{each['lowest']:,.0f} - {each['highest']:,.0f}",
                f"{each['p50_ms']:.2f}",
                f"{each['p99_ms']:.2f}",
                f"{each['cpu_seconds_per_billion_tokens']:.2f}",
            ]
            for each in shape["contenders"]
        ]
        columns = ["contender", "M tokens/s", "spread", "p50 ms", "p99 ms", "CPU s / 10^9"]
        found.append((f"{shape['shape']} uint16, median of {shape['rounds']} rounds", columns, rows))
        ratios = [
            [
                each["to"],
                f"{each['median']:.2f}",
                f"{each['lowest']:.2f} - {each['highest']:.2f}",
                "" if each["target"] is None else f">= {each['target']}",
            ]
            for each in shape["ratios"]
        ]
        found.append((f"{shape['shape']}: ours against", ["", "ratio", "spread", "target"], ratios))
    if "scale" in result:
        found.append(scale.table(result["scale"]))  # type: ignore[arg-type]
    if "plans" in result:
        found.append(plans.table(result["plans"]))  # type: ignore[arg-type]
    return found


def show(result: dict[str, object], console: Console) -> None:
    """Print every table."""
    console.print(result["machine"])
    for title, columns, rows in tables(result):
        table = Table(*columns, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def write_markdown(result: dict[str, object], write: object) -> None:
    """Write machine and tables as Markdown."""
    for name, value in result["machine"].items():  # type: ignore[attr-defined]
        write(f"- {name}: {value}\n")  # type: ignore[operator]
    for title, columns, rows in tables(result):
        write(f"\n## {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n")  # type: ignore[operator]
        for row in rows:
            write(f"| {' | '.join(row)} |\n")  # type: ignore[operator]


if __name__ == "__main__":
    main()
