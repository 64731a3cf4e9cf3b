"""A server as commands ask it: the methods of `Files` and, for plans, those of `PlanStore`."""

from __future__ import annotations

import json
import os
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen

from corpus_server.errors import CorpusServerError, InvalidParameter
from corpus_server.plan import Plan
from corpus_server.plan_store import find_by_prefix

_SECONDS = 60  # until a server must have answered
_MAX_PLANS = 1000  # of one list, and so those among which the beginning of an id is looked for


class Server:
    """A server at a URL; `CORPUS_TOKEN` is its access token, if it wants one.

    Every method raises CorpusServerError if the server refuses or cannot be reached.

    Args:
        corpus: which of its corpora is asked about; None for the only one.
    """

    def __init__(self, url: str, corpus: str | None = None) -> None:
        self._url, self._corpus = url.rstrip("/"), corpus

    def ask(self, question: str, **query: Any) -> Any:
        """Return `spans`, `statistics` or another answer about the corpus."""
        return self._get(f"/v1/corpora/{quote(self._corpus_name(), safe='')}/{question}", **query)

    def document_range(self, number: int) -> tuple[int, int]:
        """Return the tokens [start, stop) of a document."""
        found = self.ask(f"documents/{number}", format="json")
        return found["start"], found["stop"]

    def rows(self, plan: str | None, spelled: dict[str, Any], **query: Any) -> Any:
        """Return rows of a step, of a plan by its id or else as it is spelled, as text."""
        if plan is None:
            stage = {"global_batch_size": spelled["batch_size"], "mixture": {self._corpus_name(): 1}}
            document = {name: spelled[name] for name in ("seq_len", "seed", "rows")} | {"stages": [stage]}
            plan = self._get("/v1/plans", json.dumps(document).encode())["id"]
        return self._get(f"/v1/plans/{quote(plan, safe='')}/rows", **query)

    def newest(self, limit: int) -> list[tuple[Plan, float]]:
        """Return the plans seen last, each with its Unix time."""
        found = self._get("/v1/plans", limit=min(limit, _MAX_PLANS))["plans"]
        return [(Plan.from_json(each["plan"]), each["seen_unix_seconds"]) for each in found]

    def find(self, prefix: str) -> Plan:
        """Return the one plan whose id begins with `prefix`; if it is not a whole id, of the newest."""
        if len(prefix) == 64:
            return Plan.from_json(self._get(f"/v1/plans/{quote(prefix, safe='')}")["plan"])
        return find_by_prefix(prefix, {plan.id: plan for plan, _ in self.newest(_MAX_PLANS)})

    def diff(self, a: Plan, b: Plan, *, steps: int) -> Any:
        """Return what differs between two plans, and on which rows."""
        return self._get(f"/v1/plans/{a.id}/diff", other=b.id, steps=steps)

    def _corpus_name(self) -> str:
        if self._corpus is None:
            served = [each["name"] for each in self._get("/v1/corpora")["corpora"]]
            if len(served) != 1:
                raise InvalidParameter(
                    f"name a corpus with --corpus: {', '.join(served)}", parameter="corpus"
                )
            self._corpus = served[0]
        return self._corpus

    def _get(self, path: str, body: bytes | None = None, **query: Any) -> Any:
        """Return the answer of a route, to which `body` is posted if there is one."""
        try:
            request = Request(f"{self._url}{path}" + (f"?{urlencode(query)}" if query else ""), data=body)
            if token := os.environ.get("CORPUS_TOKEN", "").strip():
                request.add_header("Authorization", f"Bearer {token}")
            with urlopen(request, timeout=_SECONDS) as response:
                return json.load(response)
        except HTTPError as error:
            raise _refusal(error) from error
        except (OSError, HTTPException, ValueError) as error:
            raise CorpusServerError(
                f"no answer from {self._url}: {error}", remedy="is the server running?"
            ) from error


def _refusal(error: HTTPError) -> CorpusServerError:
    try:
        problem = json.loads(error.read())
        return CorpusServerError(problem["detail"], remedy=problem.get("remedy"))
    except (OSError, HTTPException, ValueError, TypeError, KeyError):  # a proxy's page
        return CorpusServerError(str(error))
