"""For Schemathesis: what OpenAPI cannot say about requests that it allows.

A description has no words for rules between parameters, or for what depends on the corpora of a server. A
request that should be accepted is changed here to keep them; one that should be refused is left alone.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import schemathesis

from corpus_server.plan.document import INLINE_PLAN
from corpus_server.plan.orders import ORDERS

SPELLED = tuple(INLINE_PLAN)
ONE_STRIDE = [each.name for each in ORDERS if each.stride is not None]
TOKENS = 300
"""Tokens of the smallest corpus served, at least."""


@schemathesis.hook
def before_call(context: Any, case: Any, _: Any) -> None:
    """Change a request that Schemathesis expects to be accepted."""
    if isinstance(case.query, dict) and case.query.get("follow") == "true":
        case.query.pop("follow")  # the response would never end
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    case.query = query = case.query or {}
    path = case.path
    if isinstance(case.body, dict):
        _change_plan(case.body)
    if path in ("/v1/batches", "/v1/indices", "/v1/lookup"):
        _change_plan_query(query, keep=("corpus",) if path == "/v1/lookup" else ())
    if path == "/v1/lookup":
        for name in ("start", "stop", "document"):
            query.pop(name, None)
        query |= {"token": 0, "corpus": "web"}
    if query.get("format") == "text":
        query.pop("format")  # it takes a tokenizer
    if query.get("checksum") == "tail":
        query["format"] = "raw"  # other formats have no place for it
    if path.endswith("/search"):
        case.path_parameters["name"] = "words"  # the others have no tokenizer
        query.pop("start", None)  # below the corpus's tokens
    if path.endswith("/documents"):
        for name in ("where", "sort", "skip", "first"):
            query.pop(name, None)  # what they may name depends on the metadata
    if "/recordings/" in path and {"start", "stop"} <= set(query):
        query["stop"] = max(int(query["start"]), int(query["stop"]))
    if {"since", "step"} <= set(query):
        query["since"] = min(int(query["since"]), int(query["step"]))
    if "rank" in query:
        query["rank"] = 0  # below world_size
    if path.endswith(("/tokens", "/spans")):
        for name in {"start", "count"} & set(query):
            query[name] = int(query[name]) % (TOKENS // 2)
    elif {"count", "step"} <= set(query):
        query["step"] = min(int(query["step"]), 2**40 - 4096)  # the last step has a number, too


def _change_plan_query(query: dict[str, Any], keep: tuple[str, ...]) -> None:
    """Name a plan or spell it, not both; what spells it is complete and fits the corpus."""
    spelled = "plan" not in query
    for name in SPELLED:
        if name not in keep:
            query.pop(name, None)
    query.pop("world_size", None)  # it must divide the batch
    if spelled:
        query |= {"corpus": "web", "seq_len": 16, "batch_size": 8}
        query["step"] = 0
        if "count" in query:
            query["count"] = 1


def _change_plan(document: dict[str, Any]) -> None:
    """Let stages rise from 0; leave ranges out, which rise and are those of a corpus that is there."""
    # Rows of documents need an index of documents, and not every order takes them.
    for name in ("skip_steps", "fingerprints", "rows", "lengths", "max_epochs", "num_steps"):
        document.pop(name, None)
    # JSON Schema counts 1.0 among the integers.
    for name in ("seq_len", "stride", "seed"):
        if document.get(name) is not None:
            document[name] = int(document[name])
    if (order := document.get("order")) == "olmo" or (isinstance(order, dict) and "shuffle" not in order):
        document["order"] = "shuffle"  # those of other trainers demand much of stages and corpora
    elif isinstance(order, dict):
        order["shuffle"] = {name: int(value) for name, value in order["shuffle"].items()}
    elif order in ONE_STRIDE:
        document.pop("stride", None)
    if isinstance(family := document.get("family"), dict) and family.get("double") is not None:
        family |= {"leave_out": 0.2, "double": 0.1}  # at most as much is doubled as is left out
    for number, stage in enumerate(document.get("stages", ())):
        stage["global_batch_size"] = int(stage["global_batch_size"])
        stage["from_step"] = number
        stage.pop("exclude", None)
        # None may be 65,536 times the other; amounts depend on the corpora, and end before they begin.
        stage["mixture"] = dict.fromkeys(stage.get("mixture") or {"nosuch": 1}, 1)
        for name in ("epochs", "tokens", "until"):
            stage.pop(name, None)
        if "parent" in document:
            stage.pop("seq_len", None)  # what it must divide stands in the parent
        elif stage.get("seq_len") is not None:
            _change_length(stage, document["seq_len"])


def _change_length(stage: dict[str, Any], seq_len: int) -> None:
    """Let a stage have a divisor of the plan's length, and whole windows in a step."""
    stage["seq_len"] = gcd(int(stage["seq_len"]), seq_len)
    num_parts = seq_len // stage["seq_len"]
    rows = stage["global_batch_size"]
    stage["global_batch_size"] = max(rows - rows % num_parts, num_parts)
