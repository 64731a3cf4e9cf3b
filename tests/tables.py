"""The tables of the docs that follow from the code.

    .venv/bin/python -m tests.tables    # renews all of them; a test fails where one is old

Each stands below a line `<!-- NAME: python -m tests.tables -->` of its page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from corpus_server.admission.access import KEYS
from corpus_server.admission.admission import CHECKS
from corpus_server.admission.request import SCOPES
from corpus_server.errors import CorpusServerError
from corpus_server.metrics.kinds import METRICS
from corpus_server.plan import ORDERS, ROWS
from corpus_server.plan.document import permutes
from corpus_server.plan.named import Named
from corpus_server.plan.orders.order import all_extents, neighbouring_extents
from corpus_server.responses.response import HEADERS
from corpus_server.settings import EXPOSED, all_settings
from corpus_server.web import description
from tests.serving import ROOT

Rows = Iterable[Sequence[object]]


def checks() -> Rows:
    """What may refuse a request, in the order in which it is asked."""
    yield "check", "asked for each", "lets pass"
    for each in CHECKS:
        yield each.name, each.at, each.ask.__doc__


def scopes() -> Rows:
    """Each scope of a token."""
    yield "scope", "allows"
    read = "everything about one corpus, or about all: tokens, documents, plans that use no other corpora"
    yield "`read:NAME`, `read:*`", read
    for name, scope in SCOPES.items():
        yield f"`{name}`", scope.allows


def token_keys() -> Rows:
    """Each key of a token's table in the file of tokens."""
    yield "key", "what", "accepted"
    for name, key in KEYS.items():
        yield f"`{name}`", key.meaning, key.accepted


def settings() -> Rows:
    """Each setting: the option of `serve`, and its key under `[server]`."""
    yield "option", "default", "with `--exposed`", "accepted", ""
    for each in all_settings():
        option = f"`--{each.name.replace('_', '-')}`, `{each.name}`"
        accepted = each.expected.removeprefix("in ")
        yield option, each.default, EXPOSED.get(each.name, ""), accepted, each.help


def metrics() -> Rows:
    """Each metric of `/metrics`."""
    yield "metric", "type", "labels", "meaning"
    for name, metric in METRICS.items():
        shown = f"`{name}_total`" if metric.kind == "counter" else f"`{name}`"
        yield shown, metric.kind, ", ".join(f"`{label}`" for label in metric.labels), metric.meaning


def errors() -> Rows:
    """Each type of a problem document; the last ones are the web framework's."""
    yield "`type`", "status", "when", "what to do"
    kinds = [CorpusServerError, *CorpusServerError.__subclasses__()]
    for each in sorted(kinds, key=lambda each: (each.status, each.slug)):
        when = " ".join((each.__doc__ or "").partition("\n\n")[0].split())
        advice = [each.advice] if each.advice else []
        if each.retry_after_seconds is not None:
            advice.insert(0, "wait for `Retry-After` seconds")
        yield f"`{each.slug}`", each.status, when, ", or ".join(advice)
    yield "`not-found`", 404, "No such route.", ""
    yield "`method-not-allowed`", 405, "The route has other methods.", "`Allow` lists them"
    yield "`http-error`", "other", "Refused by the web framework.", ""


def headers() -> Rows:
    """Each header that a response may have."""
    yield "response header", "meaning"
    for name, meaning in HEADERS.items():
        yield f"`{name}`", meaning


def parameters() -> Rows:
    """Each query parameter of each route under `/v1`; routes that have the same one share a row."""
    yield "parameter", "of", "meaning", "accepted", "default"
    routes: dict[tuple[str, ...], list[str]] = {}
    for route, operations in described()["paths"].items():
        for method, operation in operations.items():
            shown = f"`{'POST ' if method == 'post' else ''}{route.replace('plan_id', 'id')}`"
            for each in operation.get("parameters", ()):
                if each["in"] == "query":
                    schema = each["schema"]
                    default = "required" if each["required"] else str(schema.get("default", ""))
                    about = " ".join(each["description"].split())
                    row = each["name"], about, accepted(schema.get("anyOf", [schema])[0]), default
                    routes.setdefault(row, []).append(shown)
    for (name, about, values, default), of in routes.items():
        yield f"`{name}`", ", ".join(of), about, values, default


def named(each: type[Named]) -> str:
    """Spell an order or a kind of rows as a document names it."""
    given = ", ".join(f'"{field}": ...' for field in each.required())
    return f'`{{"{each.name}": {{{given}}}}}`' if given else f"`{each.name}`"


def kinds_of_rows() -> Rows:
    """Each kind of rows, as a document names it."""
    yield "rows", "a row", "orders", "what an exclusion replaces", "unused ends"
    for each in ROWS:
        permuting = dict.fromkeys(f"`{order.name}`" for order in ORDERS if permutes(order))
        orders = ", ".join(permuting) if each.is_permuted else "all"
        yield named(each), each.sentence, orders, f"the {each.unit}", "end-of-text" if each.fills_ends else ""


def orders() -> Rows:
    """Each order, as a document names it."""
    yield "order", "rows of a source", "extents that a cache must hold"
    kept = {all_extents: "all", neighbouring_extents: "two neighbours of each source"}
    for each in ORDERS:
        yield (
            named(each),
            each.sentence,
            kept.get(each.working_set, "[it depends](stores.md#which-order)")
            if not each.has_table
            else "local shards only",
        )


def accepted(schema: dict[str, Any]) -> str:
    """Say which values a schema accepts: a range, choices, a pattern, or a text of a length."""
    if "enum" in schema:
        single = [each for each in schema["enum"] if "," not in each]
        names = ", ".join(f"`{each}`" for each in single)
        return names if len(single) == len(schema["enum"]) else f"some of {names}, with commas between them"
    if "minimum" in schema:
        return f"[{power(schema['minimum'])}, {power(schema['maximum'])}]"
    if "pattern" in schema:
        return f"`{schema['pattern']}`"
    return f"1 to {schema['maxLength']} characters"


def power(number: int) -> str:
    """Spell a number as a power of two, if it is a large one or one below."""
    for shown, least in ((f"2^{number.bit_length() - 1}", 0), (f"2^{number.bit_length()} - 1", 1)):
        if number > 2**20 and number + least == 2 ** ((number + least).bit_length() - 1):
            return shown
    return str(number)


def described() -> dict[str, Any]:
    """Return the server's OpenAPI description."""
    return description.described().openapi()


TABLES: dict[str, tuple[Callable[[], Rows], ...]] = {
    "http.md": (parameters, headers, errors),
    "operations.md": (settings, scopes, token_keys, checks, metrics),
    "plans.md": (orders, kinds_of_rows),
}
"""By the page below `docs/`."""


def renewed(page: str, text: str) -> str:
    """Return the text of a page with the tables that follow from the code."""
    for table in TABLES[page]:
        cells = [[str(cell).replace("|", r"\|") for cell in row] for row in table()]
        head, *rows = [f"| {' | '.join(row)} |\n".replace("|  ", "| ") for row in cells]
        line = f"|{'---|' * (head.count('|') - 1)}\n"
        marker = f"<!-- {table.__name__}: python -m tests.tables -->\n"
        if marker not in text:
            raise ValueError(f"docs/{page} lacks the line {marker}")
        before, _, rest = text.partition(marker)
        rest = re.sub(r"\A\n*(\|.*\n)*\n*", "", rest)
        text = f"{before}{marker}\n{head}{line}{''.join(rows)}\n{rest}"
    return text


if __name__ == "__main__":
    for name in TABLES:
        path = ROOT / "docs" / name
        path.write_text(renewed(name, path.read_text()))
