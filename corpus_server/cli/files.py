"""The files of a corpus as commands ask them: the functions behind a server's routes, in this process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from corpus_server.admission.request import ANYONE, RequestHead
from corpus_server.answers import inspection
from corpus_server.answers.inspection import RowsQuery, SpansQuery, StatisticsQuery
from corpus_server.answers.response import Response, Slices
from corpus_server.answers.service import Service
from corpus_server.answers.tokens import PlanQuery, plan_of
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter
from corpus_server.settings import Settings


class Files:
    """One corpus; its methods are those of `Server` about a corpus and return the same."""

    def __init__(self, service: Service, name: str) -> None:
        self._service, self._corpus = service, service.corpus(name, ANYONE)
        self.document_range = self._corpus.document_range

    def spans(self, **query: Any) -> Any:
        """Return a range of tokens as text."""
        asked = SpansQuery.model_construct(**query)
        return _finished(inspection.corpus_spans(self._service, self._corpus, asked))

    def statistics(self, **query: Any) -> Any:
        """Return what a sample of the corpus is made of."""
        asked = StatisticsQuery.model_construct(**query)
        return _finished(inspection.statistics(self._service, self._corpus, asked))

    def rows(self, plan: str | None, spelled: dict[str, Any], **query: Any) -> Any:
        """Return rows of a step as text."""
        if plan is not None:
            raise InvalidParameter("a plan's id needs a server; spell the plan for files", parameter="plan")
        document = PlanQuery.model_construct(corpus=self._corpus.name, **spelled)
        plan_id = plan_of(self._service, document, ANYONE).plan.id
        asked = RowsQuery.model_construct(**query)
        head = RequestHead("GET", b"/", {}, caller=ANYONE)
        return _finished(inspection.rows(self._service, plan_id, asked, head))


@contextmanager
def open_files(spec: CorpusSpec) -> Iterator[Files]:
    """Open a corpus to ask about it."""
    with (
        tempfile.TemporaryDirectory(prefix="corpus-server-") as folder,
        Service.open(Settings(corpora=(spec,), state_dir=Path(folder))) as service,
    ):
        yield Files(service, spec.name)


def _finished(work: Slices[Response]) -> Any:
    while True:
        try:
            waiting = next(work)
        except StopIteration as end:
            return json.loads(b"".join(bytes(part) for group in end.value.body for part in group))
        if waiting is not None:
            waiting.result()
