"""Reports of what was found: Markdown for a terminal or an issue, HTML like the server's page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from importlib.resources import files
from typing import Any, Final

from corpus_server.errors import counted

MAX_ITEMS: Final = 1000
"""Of a report for people; the JSON has all."""
_MAX_SPANS: Final = 20
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_TEXT: Final = 160  # characters of a cell

_PLAIN: Final = {
    **{ord(each): " " for each in "\n\r\t"},
    **{ord(each): f"\\{each}" for each in "\\|`*_~[]:@"},  # the last two: addresses become links
}
"""Characters of a text that Markdown would read as markup."""


def summary(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table with a line for each corpus."""
    head = ["corpus", "tokens", "items looked for", "items found", *_share_names(report)]
    head += ["spans", "documents"]
    has_steps = "plan" in report
    head += ["items seen", "first step"] if has_steps else []
    rows = []
    for each in report["corpora"]:
        documents = each["num_documents_found"]
        looked_for = report["num_items"] - each["num_items_too_short"]
        row = [each["corpus"], f"{each['num_tokens']:,}", f"{looked_for:,}", f"{each['num_items_found']:,}"]
        row += [f"{count:,}" for count in each["num_items_by_share"].values()]
        row += [f"{each['num_spans']:,}", "no index" if documents is None else f"{documents:,}"]
        if has_steps:
            row += [f"{each['num_items_seen']:,}", _step(each["first_step"])]
        rows.append(row)
    return head, rows


def sentences(report: dict[str, Any]) -> list[str]:
    """Return what the table does not say."""
    unit = _unit(report)
    run = counted(report["n"], unit)
    said = [
        f"{counted(report['num_items'], 'item')}; an item is found if {run} of it "
        f"{'stands' if report['n'] == 1 else 'stand together'} in a corpus, "
        f"and its share is that of its {unit}s that do."
    ]
    said += [
        f"{each['corpus']}: not looked for: {counted(each['num_items_too_short'], 'item')} of fewer than "
        f"{run}; -n looks for shorter n-grams."
        for each in report["corpora"]
        if each["num_items_too_short"]
    ]
    if report["min_share"]:
        said.append(f"Items that are covered by less than {report['min_share']:.0%} are left out.")
    if cut := sum(not each["is_complete"] for each in report["items"]):
        said.append(
            f"Not all places are listed of {counted(cut, 'item')}: n-grams stand in more than "
            f"{counted(report['num_places'], 'place')}, or overlap themselves as in a line of `=`."
        )
    if "plan" in report:
        said.append(
            f"Steps are those before {report['before_step']:,} of plan {report['plan'][:12]} whose batch "
            f"held {run} of a span in one row."
        )
    return said


def _unit(report: dict[str, Any]) -> str:
    return "byte" if report["by"] == "text" else "token"


def as_markdown(report: dict[str, Any]) -> str:
    """Return a report as Markdown."""
    lines = ["# What the corpora have of the items", ""]
    lines += [*_table(*summary(report)), "", *(f"- {_flat(each)}" for each in sentences(report)), ""]
    if report["items"]:
        head = ["item", "corpus", "share", "tokens", "longest", "places", "documents"]
        head += ["first step"] if "plan" in report else []
        rows = [_item_row(each) for each in report["items"][:MAX_ITEMS]]
        lines += ["## Items", "", *_table([*head, "text"], rows), ""]
        lines += [_left_out(report)] if len(report["items"]) > MAX_ITEMS else []
    return "\n".join(lines)


def as_html(report: dict[str, Any]) -> str:
    """Return a report as one file, with the styles of the server's page; nothing is loaded from elsewhere."""
    style = files("corpus_server.web.page").joinpath("static/page.css").read_text()
    return "".join(_html(report, style))


def _html(report: dict[str, Any], style: str) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    # Text of a corpus that looks like markup stays text; if a mistake were made here, nothing would run.
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="color-scheme" content="light dark"><title>What the corpora have of the items</title>'
    yield f"<style>{style}</style></head><body><main><h1>What the corpora have of the items</h1>"
    head, rows = summary(report)
    yield _html_table(head, rows)
    yield "".join(f'<p class="quiet">{escape(each)}</p>' for each in sentences(report))
    if report["items"]:
        yield "<h2>Items</h2>"
    for item in report["items"][:MAX_ITEMS]:
        yield from _html_item(item, _unit(report))
    if len(report["items"]) > MAX_ITEMS:
        yield f"<p>{escape(_left_out(report))}</p>"
    yield "</main></body></html>\n"


def _html_item(item: dict[str, Any], unit: str) -> Iterator[str]:
    name = f"{item['source']}, item {item['number']:,}"
    told = f"{item['share']:.0%} of {counted(item['num_tokens'], unit)} in {item['corpus']}"
    seen = f", first seen by step {_step(item['first_step'])}" if item.get("first_step") is not None else ""
    yield f'<section class="card found"><h3>{escape(name)}</h3><p>{escape(told + seen)}</p><div class="text">'
    for part in item["parts"]:
        text = escape(_visible(part["text"]))
        yield f"<mark>{text}</mark>" if part["is_found"] else f"<span>{text}</span>"
    yield "</div>"
    head = ["document", "tokens", "length"]
    head += ["rows", "steps"] if "first_step" in item else []
    yield _html_table(head, [_span_row(each) for each in item["spans"][:_MAX_SPANS]])
    left = len(item["spans"]) - _MAX_SPANS
    others = f"In the JSON: {counted(left, 'more place')}. " if left > 0 else ""
    if not item["is_complete"]:
        others += "Other places are known and not listed."
    yield f'<p class="quiet">{others}</p></section>' if others else "</section>"


def _span_row(span: dict[str, Any]) -> list[str]:
    documents = " to ".join(f"{each:,}" for each in span["documents"]) or "-"
    row = [documents, f"{span['start']:,} to {span['stop'] - 1:,}", f"{span['num_tokens']:,}"]
    if (seen := span.get("seen")) is None:
        return row
    more = "" if seen["is_complete"] else " and more"
    shown = ", ".join(f"{each:,}" for each in seen["steps"]) or "none"
    return [*row, f"{seen['num_rows']:,}{more}", shown]


def _item_row(item: dict[str, Any]) -> list[str]:
    documents = list(dict.fromkeys(each for span in item["spans"] for each in span["documents"]))
    named = ", ".join(map(str, documents[:5])) + (", ..." if len(documents) > 5 else "")
    text = "".join(part["text"] for part in item["parts"] if part["is_found"])
    row = [f"{item['source']} {item['number']}", item["corpus"], f"{item['share']:.0%}"]
    row += [f"{item['num_tokens']:,}", f"{item['longest']:,}", f"{len(item['spans']):,}", named or "-"]
    row += [_step(item["first_step"])] if "first_step" in item else []
    return [*row, text if len(text) <= _TEXT else f"{text[:_TEXT]}..."]


def _share_names(report: dict[str, Any]) -> list[str]:
    shares = report["corpora"][0]["num_items_by_share"] if report["corpora"] else {}
    return [f"{float(each):.0%} and more" for each in shares]


def _step(step: int | None) -> str:
    return "none" if step is None else f"{step:,}"


def _left_out(report: dict[str, Any]) -> str:
    return f"Covered less, and in the JSON alone: {counted(len(report['items']) - MAX_ITEMS, 'item')}."


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(_flat(cell) for cell in line)} |" for line in lines]


def _flat(text: str) -> str:
    """Return text that neither ends a cell of Markdown nor is read as markup."""
    return escape(_visible(text), quote=False).translate(_PLAIN).replace("www.", "www\\.")


def _visible(text: str) -> str:
    """Return text without characters that a terminal obeys, or that turn the direction of what follows."""
    return "".join(each if each.isprintable() or each in "\n\t" else f"\\u{ord(each):04x}" for each in text)


def _html_table(head: list[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<th>{escape(each)}</th>" for each in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(_visible(cell))}</td>' for cell in row)}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
