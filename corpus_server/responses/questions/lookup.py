"""Look-ups: every row of the first epochs that holds a token, a range of tokens or a document."""

from __future__ import annotations

from typing import Annotated, Final

from corpus_server.admission.request import RequestHead
from corpus_server.corpus.corpus import Corpus
from corpus_server.described import described
from corpus_server.errors import InvalidParameter
from corpus_server.plan.family import MAX_MEMBERS
from corpus_server.plan.questions.lookup import Sighting, look_up
from corpus_server.plan.questions.members import MemberSightings, sightings_of_members
from corpus_server.responses.question import (
    CorpusName,
    PlanId,
    PlanQuery,
    QueryParameters,
    Token,
    integer,
    question,
)
from corpus_server.responses.response import NO_STORE, PLAN_HEADER, Response, json_response, not_modified
from corpus_server.responses.service import Service
from corpus_server.responses.tokens import plan_headers, plan_of
from corpus_server.work import Budget, Limits


class LookupQuery(PlanQuery):
    """Parameters of a look-up; `corpus` names the source also where the plan is named by its id."""

    token: Token | None = None
    """A token, corpus-wide; of a view, in its corpus, as all that is looked up."""
    start: Token | None = None
    """First token of a range."""
    stop: Token | None = None
    """End of the range, exclusive."""
    document: Token | None = None
    """A document, where the corpus has an index."""
    epochs: Annotated[int, integer(1, 10_000)] = 1
    """Passes over the source to look through."""
    limit: Annotated[int, integer(1, 100_000)] = 1000
    """Rows to return at most, earliest first."""


@described
class Found:
    """Every row that holds a token, a range or a document."""

    plan: str
    corpus: str
    start: int
    stop: int
    epochs: int
    num_found: int
    truncated: bool
    rows: list[Sighting]


LIMITS: Final = Limits(rows=2**21, num_bytes=2**30)
"""Units times epochs, with those of the excluded units for which they stand in, and 256 for each block of a
mixture: about 2 s."""


@question("/v1/lookup", Found, is_tagged=True, limits=LIMITS)
def lookup(service: Service, query: LookupQuery, request: RequestHead, budget: Budget) -> Response:
    """Return every row of the first epochs that holds a token, a range of tokens or a document."""
    bound = plan_of(service, query, request.caller, budget, names_corpus=True)
    corpus = _looked_up_corpus(query.corpus, bound.plan.sources)
    start, stop = _looked_up_range(query, bound.corpora[corpus].base)
    epochs, limit = query.epochs, query.limit
    identity = f"lookup.{corpus}.{start}.{stop}.{epochs}.{limit}"
    # Where a document lies is said by an index, which may be made anew with another end of text.
    by_id = query.plan is not None and query.document is None
    headers = plan_headers(bound, request, identity, by_id=by_id)
    if (unchanged := not_modified(request, headers)) is not None:
        return unchanged
    found = look_up(bound.sampler, corpus, start, stop, budget, epochs=epochs, limit=limit)
    fields = Found(
        plan=bound.plan.id,
        corpus=corpus,
        start=start,
        stop=stop,
        epochs=epochs,
        num_found=found.num_found,
        truncated=found.num_found > len(found.rows),
        rows=found.rows,
    )
    return json_response(fields, headers, budget)


class MembersQuery(QueryParameters):
    """Parameters of a look-up over the members of a family."""

    document: Token
    """A document; of a view, in its corpus."""
    corpus: CorpusName | None = None
    """A source of the plan; may be left out if it has one."""
    first: Annotated[int, integer(0, MAX_MEMBERS - 1)] = 0
    """The first member."""
    count: Annotated[int, integer(1, MAX_MEMBERS)] = 1000
    """Members, from the first on."""
    epochs: Annotated[int, integer(1, 1000)] = 1
    """Passes over the source to look through."""
    limit: Annotated[int, integer(1, 1000)] = 10
    """Steps to return of each member at most, earliest first."""


@described
class FoundInMembers:
    """Which members of a family hold a document."""

    plan: str
    corpus: str
    document: int
    epochs: int
    num_left_out: int
    """Members that leave it out."""
    num_doubled: int
    """Members that double it."""
    members: list[MemberSightings]


@question("/v1/plans/{plan_id}/members", FoundInMembers, limits=LIMITS)
def members(
    service: Service, plan_id: PlanId, query: MembersQuery, request: RequestHead, budget: Budget
) -> Response:
    """Say of each member of a plan's family whether its rows hold a document, and at which steps."""
    bound = service.plan(plan_id, request.caller, budget)
    corpus = _looked_up_corpus(query.corpus, bound.plan.sources)
    stop = query.first + query.count
    if stop > MAX_MEMBERS:
        raise InvalidParameter.expected(
            "count", f"at most {MAX_MEMBERS - query.first} from there", query.count
        )
    found = sightings_of_members(
        bound.sampler,
        corpus,
        query.document,
        bound.corpora[corpus].base.document_range(query.document),
        range(query.first, stop),
        budget,
        epochs=query.epochs,
        limit=query.limit,
    )
    fields = FoundInMembers(
        plan=bound.plan.id,
        corpus=corpus,
        document=query.document,
        epochs=query.epochs,
        num_left_out=sum(each.leaves_out for each in found),
        num_doubled=sum(each.doubles for each in found),
        members=found,
    )
    return json_response(fields, {**NO_STORE, PLAN_HEADER: bound.plan.id}, budget)


def _looked_up_corpus(corpus: str | None, sources: tuple[str, ...]) -> str:
    if corpus in sources:
        return corpus
    if corpus is None and len(sources) == 1:
        return sources[0]
    raise InvalidParameter(
        f"corpus must name a source of the plan, {', '.join(sources)}, got {corpus!r}",
        parameter="corpus",
        received=corpus,
        accepted=", ".join(sources),
    )


def _looked_up_range(query: LookupQuery, corpus: Corpus) -> tuple[int, int]:
    """Return the tokens that a query names in one of its three ways."""
    ways = {
        "token": query.token is not None,
        "document": query.document is not None,
        "start and stop": query.start is not None or query.stop is not None,
    }
    given = [way for way, is_given in ways.items() if is_given]
    if len(given) != 1:
        raise InvalidParameter(
            f"name what to look up by one of {', '.join(ways)}, got {' and '.join(given) or 'none'}",
            parameter="token",
            accepted=", ".join(ways),
        )
    if query.document is not None:
        return corpus.document_range(query.document)
    start, stop = (query.start, query.stop) if query.token is None else (query.token, query.token + 1)
    if start is None or stop is None or not start < stop <= corpus.num_tokens:
        if query.token is not None:
            accepted = f"in [0, {corpus.num_tokens}), the tokens of corpus {corpus.name!r}"
            raise InvalidParameter.expected("token", accepted, query.token)
        raise InvalidParameter(
            f"tokens must lie in [0, {corpus.num_tokens}) with start < stop, got start {start}, stop {stop}",
            parameter="start" if start is None or start >= corpus.num_tokens else "stop",
            received=start if start is None or start >= corpus.num_tokens else stop,
            accepted=f"0 <= start < stop <= {corpus.num_tokens}",
        )
    return start, stop
