"""Answers of a server's routes, or of the same functions over files in this process."""

from __future__ import annotations

import json
import os
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from corpus_server.admission.access import ANYONE
from corpus_server.admission.request import RequestHead
from corpus_server.answers import inspection
from corpus_server.answers.inspection import RowsQuery, SpansQuery, StatisticsQuery
from corpus_server.answers.queries import PlanQuery
from corpus_server.answers.response import Response, Slices
from corpus_server.answers.service import Service
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import CorpusServerError, InvalidParameter
from corpus_server.settings import Settings

_SECONDS = 60  # until a server must have answered

Ask = Callable[..., Any]
"""Called with what is asked (`spans`, `statistics`, `document`, `rows`) and its parameters."""


@contextmanager
def of_files(spec: CorpusSpec) -> Iterator[Ask]:
    """Yield a function that answers from the files of a corpus."""
    with tempfile.TemporaryDirectory(prefix="corpus-server-") as folder:
        settings = Settings(corpora=(spec,), state_dir=Path(folder))
        with Service.open(settings) as service:
            yield _of_service(service, spec.name)


def _of_service(service: Service, name: str) -> Ask:
    corpus = service.corpus(name, ANYONE)
    head = RequestHead("GET", b"/", {}, caller=ANYONE)

    def ask(what: str, **asked: Any) -> Any:
        if what == "document":
            return corpus.document_range(asked["number"])
        if what == "rows":
            if asked["plan"] is not None:
                raise InvalidParameter(
                    "a plan's id needs a server; spell the plan for files", parameter="plan"
                )
            spelled = PlanQuery.model_construct(corpus=name, **asked["spelled"])
            bound = service.plan_of(spelled, ANYONE)
            query = RowsQuery.model_construct(step=asked["step"], first=0, count=asked["count"])
            return _finished(inspection.rows(service, bound.plan.id, query, head))
        if what == "spans":
            return _finished(inspection.corpus_spans(service, corpus, SpansQuery.model_construct(**asked)))
        return _finished(inspection.statistics(service, corpus, StatisticsQuery.model_construct(**asked)))

    return ask


def _finished(work: Slices[Response]) -> Any:
    while True:
        try:
            waiting = next(work)
        except StopIteration as end:
            return json.loads(b"".join(bytes(part) for group in end.value.body for part in group))
        if waiting is not None:
            waiting.result()


def of_server(url: str, corpus: str | None) -> Ask:
    """Return a function that asks a server.

    Args:
        corpus: which of its corpora; None for the only one.
    """

    def get(path: str, body: object = None, **query: Any) -> Any:
        given = {name: value for name, value in query.items() if value is not None}
        request = urllib.request.Request(
            f"{url}{path}" + (f"?{urllib.parse.urlencode(given)}" if given else ""),
            data=None if body is None else json.dumps(body).encode(),
        )
        if token := os.environ.get("CORPUS_TOKEN"):
            request.add_header("Authorization", f"Bearer {token}")
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            problem = json.loads(error.read() or b"{}")
            raise CorpusServerError(
                problem.get("detail", str(error)), remedy=problem.get("remedy")
            ) from error
        except OSError as error:
            raise CorpusServerError(
                f"no answer from {url}: {error}", remedy="is the server running?"
            ) from error

    def name() -> str:
        if corpus is not None:
            return corpus
        served = [each["name"] for each in get("/v1/corpora")["corpora"]]
        if len(served) != 1:
            raise InvalidParameter(f"name a corpus with --corpus: {', '.join(served)}", parameter="corpus")
        return str(served[0])

    def ask(what: str, **asked: Any) -> Any:
        if what == "rows":
            plan, spelled = asked.pop("plan"), asked.pop("spelled")
            if plan is None:
                spelled["mixture"], size = {name(): 1}, spelled.pop("batch_size")
                stage = {"global_batch_size": size, "mixture": spelled.pop("mixture")}
                plan = get("/v1/plans", body={**spelled, "stages": [stage]})["id"]
            return get(f"/v1/plans/{plan}/rows", **asked)
        route = f"/v1/corpora/{urllib.parse.quote(name(), safe='')}"
        if what == "document":
            answer = get(f"{route}/documents/{asked['number']}", format="json")
            return answer["start"], answer["stop"]
        return get(f"{route}/{what}", **asked)

    return ask
