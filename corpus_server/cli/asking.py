"""What commands ask about a plan: a server that knows it, or this process over the plan's corpora."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from re import fullmatch

from corpus_server.cli.common import read_text
from corpus_server.cli.server import Asked, Server
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter
from corpus_server.plan_store import PlanStore
from corpus_server.settings import default_state_dir


@contextmanager
def asked_about(
    plan: str, url: str | None, specs: Sequence[CorpusSpec], state_dir: Path | None
) -> Iterator[tuple[Asked, str]]:
    """Yield what answers about a plan, and the plan's id there.

    Args:
        plan: file of its document, or the beginning of its id.
        url: of a server; None: the corpora of `specs` are asked.
        state_dir: of the server that kept the plan, where no server is asked.
    """
    document = None
    if Path(plan).exists() and not Path(plan).is_dir():
        document = read_text(Path(plan), "plan").encode()
    if document is None and not fullmatch("[0-9a-f]{1,64}", plan):
        raise InvalidParameter.expected("plan", "a file, or the beginning of a plan's id", plan)
    if url is not None:
        server = Server(url)
        yield server, server.id_of(plan) if document is None else server.ask("/v1/plans", document)["id"]
        return
    if document is None:
        with PlanStore(state_dir or default_state_dir(), read_only=True) as store:
            known = store.find(plan)
        if lost := set(known.sources).difference(each.name for each in specs):
            name = min(lost)
            raise InvalidParameter(
                f"plan {known.id[:12]} reads corpus {name!r}, too: name it as {name}=PATH, or ask a server "
                "that has it",
                parameter="plan",
            )
        document = known.canonical_json.encode()
    from corpus_server.cli.files import open_files  # loads pydantic, which other uses do not wait for

    with open_files(*specs) as files:
        yield files, files.ask("/v1/plans", document)["id"]
