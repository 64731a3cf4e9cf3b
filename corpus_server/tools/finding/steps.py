"""Which steps of a run saw what was found, and which of them first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import quote

from corpus_server.corpus.progress import Progress
from corpus_server.tools.finding.finding import Found

Ask = Callable[..., Any]
"""Returns what a route of a server answers: its path, then its parameters by name."""

_ROWS: Final = 1000  # of one look-up
_SHOWN_STEPS: Final = 20
_MAX_EPOCHS: Final = 10_000  # of one look-up


def add_steps(
    report: dict[str, Any],
    found: Sequence[Found],
    ask: Ask,
    plan: str,
    before_step: int,
    progress: Progress | None = None,
) -> None:
    """Add to each span of a report the steps before `before_step` whose batch held an n-gram of it.

    A row holds one if it has n of the span's tokens together, or n of its bytes where text is compared. Spans
    of corpora that the plan does not read were seen by no step.

    Args:
        report: what `describe` makes of `found`.
        plan: id of a plan that the server knows.
    """
    route = f"/v1/plans/{quote(plan, safe='')}"
    usage = ask(f"{route}/usage", step=before_step)
    skipped = usage["skipped"]["sources"]
    # An order without epochs has none to count; the look-up refuses it by name.
    epochs = {
        name: min(_MAX_EPOCHS, int((used["epochs"] or 0) + (skipped[name]["epochs"] or 0)) + 1)
        for name, used in usage["sources"].items()
    }
    report |= {"plan": usage["plan"], "before_step": before_step}
    known: dict[tuple[str, int, int], dict[str, Any]] = {}
    own = ((each, number) for each in found for _, numbers in each.listed for number in numbers)
    spans = (span for item in report["items"] for span in item["spans"])
    num_spans = sum(each.spans.item.size for each in found)
    for done, ((its, number), span) in enumerate(zip(own, spans, strict=True)):
        # Of two spans at one place in the corpus other bytes of the first and the last token may be held.
        place = its.corpus.name, int(its.spans.place[number]), int(its.spans.item_length[number])
        if place not in known:
            known[place] = (
                _seen(ask, plan, span, its, number, epochs[place[0]], report["n"], before_step)
                if place[0] in epochs
                else {"num_rows": 0, "steps": [], "is_complete": True}
            )
        span["seen"] = known[place]
        if progress is not None:
            progress("looking up steps", done + 1, num_spans, 0)
    for item in report["items"]:
        first = [span["seen"]["steps"][0] for span in item["spans"] if span["seen"]["steps"]]
        item["first_step"] = min(first, default=None)
    for corpus in report["corpora"]:
        firsts = [each["first_step"] for each in report["items"] if each["corpus"] == corpus["corpus"]]
        seen = [each for each in firsts if each is not None]
        corpus |= {"num_items_seen": len(seen), "first_step": min(seen, default=None)}


def _seen(
    ask: Ask,
    plan: str,
    span: dict[str, Any],
    found: Found,
    number: int,
    epochs: int,
    n: int,
    before_step: int,
) -> dict[str, Any]:
    start, stop = span["start"], span["stop"]
    place = {"corpus": found.corpus.name, "start": start, "stop": stop}
    answer = ask("/v1/lookup", plan=plan, **place, epochs=epochs, limit=_ROWS)
    before = found.before(number)

    def held(row: dict[str, Any]) -> int:
        at = row["held_at"] % (stop - start)  # a view may hold the span several times
        return int(before[min(at + row["held"], stop - start)] - before[at])

    rows = [
        each
        for each in answer["rows"]
        if each["step"] is not None and each["step"] < before_step and held(each) >= n
    ]
    # The rows come by step: those that a limit cut off come later.
    last = answer["rows"][-1]["step"] if answer["rows"] else None
    is_complete = not answer["truncated"] or (last is not None and last >= before_step)
    steps = list(dict.fromkeys(each["step"] for each in rows))
    return {"num_rows": len(rows), "steps": steps[:_SHOWN_STEPS], "is_complete": is_complete}
