"""What users may say about documents: one expression of DuckDB's SQL over the columns of the metadata.

A text is parsed by DuckDB and its tree checked before anything is evaluated: one expression, of functions
that depend on nothing but their arguments. So it cannot read a file, ask the network or change a setting,
and the connection could not either (see `metadata.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from corpus_server.errors import InvalidParameter

MAX_CHARACTERS: Final = 10_000
_MAX_DEPTH: Final = 200  # of brackets: parsers recurse

_REFUSED: Final = {
    "SUBQUERY": "a query inside",
    "WINDOW": "a window function",
    "STAR": "*",
    "PARAMETER": "a parameter",
    "LAMBDA": "a lambda",
    "LAMBDA_REF": "a lambda",
    "POSITIONAL_REFERENCE": "a column by its number",
    "DEFAULT": "DEFAULT",
}
_ALLOWED: Final = {
    *("BETWEEN", "CASE", "CAST", "COLLATE", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT"),
    *("FUNCTION", "OPERATOR", "TYPE"),
}
_SESSION: Final = {
    *("current_setting", "getvariable", "getenv", "current_database", "current_schema", "current_schemas"),
    *("current_query", "current_user", "session_user", "user", "version", "txid_current", "in_search_path"),
    "age",  # of one time: until today
}
"""Functions of the connection, which DuckDB 1 says are consistent."""
_PURE: Final = """
    SELECT bool_and(function_type = 'scalar' AND NOT has_side_effects AND (stability = 'CONSISTENT'
        OR list_has_any(parameter_types, ['TIMESTAMP WITH TIME ZONE', 'TIMESTAMPTZ_NS'])))
    FROM duckdb_functions() WHERE lower(function_name) = lower(?)
"""
"""Those of times with a zone, such as `+` and `year`, also depend on the connection's zone, which is UTC."""


def check_expression(connection: Any, what: str, text: str) -> tuple[str, list[list[str]]]:
    """Return an expression that may be evaluated, as an item of a SELECT, and the columns that it names.

    A name has parts: a table or a struct, and a field of it.

    Raises:
        InvalidParameter: naming what is not allowed.
    """
    if len(text) > MAX_CHARACTERS:
        raise _refused(what, f"at most {MAX_CHARACTERS:,} characters, got {len(text):,}")
    text.encode()  # raises UnicodeEncodeError, which DuckDB would say in its own words
    if "\0" in text:
        raise _refused(what, "text without zero bytes")
    depth = most = 0
    for each in text:
        depth += (each in "([{") - (each in ")]}")
        most = max(most, depth)
    if most > _MAX_DEPTH:
        raise _refused(what, f"at most {_MAX_DEPTH} brackets in each other, got {most}")
    item = f"(\n{text}\n)"
    ((response,),) = connection.execute(
        "SELECT json_serialize_sql(?::VARCHAR)", [f"SELECT {item}"]
    ).fetchall()
    try:
        parsed = json.loads(response)
    except RecursionError as error:
        raise _refused(what, "an expression that is not nested so deeply") from error
    if parsed.get("error"):
        raise _refused(
            what, f"one expression; DuckDB says: {str(parsed.get('error_message')).splitlines()[0]}"
        )
    names = []
    nodes = [*_expression(what, parsed)]
    if nodes[0].get("function_name") == "row":  # as DuckDB reads nothing, and several with commas between
        raise _refused(what, "one expression, and neither none nor several")
    for node in nodes:
        kind = node["class"]
        if kind not in _ALLOWED:
            raise _refused(what, f"an expression without {_REFUSED.get(kind, kind.lower())}")
        if kind == "FUNCTION":
            _check_function(connection, what, node)
        if kind == "COLUMN_REF":
            names.append(node["column_names"])
    return item, names


def _expression(what: str, parsed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the nodes of the one expression of a statement; refuse any other statement."""
    statements = parsed["statements"]
    node = statements[0]["node"] if len(statements) == 1 else {}
    only = (
        node.get("type") == "SELECT_NODE"
        and len(items := node["select_list"]) == 1
        and not items[0].get("alias")
        and node["from_table"]["type"] == "EMPTY"
        and not node["cte_map"]["map"]
        and not any(
            node.get(part)
            for part in (
                "modifiers",
                "where_clause",
                "group_expressions",
                "group_sets",
                "having",
                "sample",
                "qualify",
            )
        )
    )
    if not only:
        raise _refused(what, "one expression, as it stands behind WHERE, and no statement")
    pending: list[Any] = list(node["select_list"])
    while pending:
        each = pending.pop()
        if isinstance(each, list):
            pending += each
        elif isinstance(each, dict):
            if "class" in each:
                yield each
            pending += each.values()


def _check_function(connection: Any, what: str, node: dict[str, Any]) -> None:
    name = node["function_name"]
    ((is_pure,),) = connection.execute(_PURE, [name]).fetchall()
    has_more = node.get("filter") or node.get("distinct") or (node.get("order_bys") or {}).get("orders")
    if (
        is_pure is not True
        or name.lower() in _SESSION
        or has_more
        or node.get("schema")
        or node.get("catalog")
    ):
        raise _refused(what, f"functions of a document's own columns alone, not {name}()")


def _refused(what: str, accepted: str) -> InvalidParameter:
    return InvalidParameter(f"--{what}: expected {accepted}", parameter=what, accepted=accepted)
