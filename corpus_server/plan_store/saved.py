"""A plan as a file that people exchange.

    {"kind": "corpus-plan", "version": 1, "id": "<64 hex>", "plan": {...}, "links": [{...}, ...],
     "corpora": {"web": {"fingerprint": "sampled-...", "num_tokens": 10, "address": "hf://...", ...}}}

`plan` is the canonical document, and each of `links` that of a stage which continues the plan before it. The
id follows from these, so whoever reads the file can check them. `corpora` says where the tokens can be had,
as far as the server that saved it knew; nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from corpus_server.errors import InvalidPlan
from corpus_server.plan.canonical import canonical, id_of, parse_json
from corpus_server.plan.document import Plan

SAVED_KIND: Final = "corpus-plan"
SAVED_VERSION: Final = 1

_REMEDY: Final = "save the plan again with `corpus-server plans save`"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedPlan:
    """A saved plan whose documents are those of its id.

    Attributes:
        links: in order; none of a plan that continues no other one.
        fingerprints: of all corpora, by name.
        corpora: what else the file says of them, by name.
    """

    id: str
    plan: Mapping[str, Any]
    links: Sequence[Mapping[str, Any]]
    fingerprints: Mapping[str, str]
    corpora: Mapping[str, Mapping[str, Any]]


def saved_plan(plan: Plan, links: Sequence[str] = ()) -> str:
    """Return the file of a plan whose corpora nobody knows: its root, and the documents of its links."""
    fields = f'"kind":"{SAVED_KIND}","version":{SAVED_VERSION},"id":"{plan.id}"'
    return f'{{{fields},"plan":{plan.root.canonical_json},"links":[{",".join(links)}],"corpora":{{}}}}'


def read_saved(text: str) -> SavedPlan:
    """Read a saved plan, or a canonical document alone.

    Raises:
        InvalidPlan: it is neither, or was changed since it was saved.
    """
    found = parse_json(text, lambda parsed: parsed)
    if not isinstance(found, Mapping):
        raise InvalidPlan(f"holds no saved plan, but a JSON {type(found).__name__}", remedy=_REMEDY)
    if found.get("kind") != SAVED_KIND:
        found = {"version": SAVED_VERSION, "plan": found}
    if found["version"] != SAVED_VERSION:
        raise InvalidPlan(
            f"is a saved plan of version {found['version']!r:.50}, and this release reads {SAVED_VERSION}",
            remedy="install the release that saved it, or a later one",
        )
    document, links, corpora = found.get("plan"), found.get("links", []), found.get("corpora", {})
    is_whole = isinstance(links, list) and all(map(_is_link, links))
    if not is_whole or not isinstance(corpora, dict) or not isinstance(document, dict):
        raise InvalidPlan("plan, links and corpora must be objects, links a list", remedy=_REMEDY)
    plan = Plan.from_json(document)  # names what is wrong in it
    if set(plan.fingerprints) != set(plan.sources):
        lacking = ", ".join(sorted(set(plan.sources) - set(plan.fingerprints)))
        raise InvalidPlan(
            f"the plan has no fingerprint of {lacking}, so it may mean any corpus of that name",
            remedy="save the plan from a server that has its corpora; or post the document there yourself",
        )
    before, fingerprints = plan.id, dict(plan.fingerprints)
    for link in links:
        if link.get("parent") != before:
            raise _changed(f"a link continues {link.get('parent')!r:.80}, not {before}")
        before = id_of(canonical(link))
        fingerprints |= link.get("fingerprints", {})
    if found.get("id", before) != before:
        raise _changed(f"it says {found['id']!r:.80}, its documents come to {before}")
    said = {name: its for name, its in corpora.items() if isinstance(its, dict)}
    return SavedPlan(id=before, plan=document, links=links, fingerprints=fingerprints, corpora=said)


def _is_link(link: object) -> bool:
    names = ("fingerprints", "lengths")
    return (
        isinstance(link, dict)
        and isinstance(link.get("stages"), list)
        and all(isinstance(link.get(name, {}), dict) for name in names)
    )


def _changed(how: str) -> InvalidPlan:
    return InvalidPlan(f"the plan is not that of its id: {how}", parameter="id", remedy=_REMEDY)
