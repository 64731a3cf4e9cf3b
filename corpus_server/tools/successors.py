"""Plans that go on without some documents: which tokens these are, and the document to post.

what says which documents           tokens
report of `corpus-server find`      its `exclude`
list of documents                   theirs, by the corpus's document index
view of the corpus                  those of the documents that it does not hold
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.views.file import ViewFile
from corpus_server.corpus.views.view import open_corpus
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter
from corpus_server.tools.finding import document_ranges
from corpus_server.tools.viewing import read_list
from corpus_server.user_files import parse_json, read_regular, reason_of

Exclude = dict[str, list[list[int]]]
"""Of each corpus the ranges of tokens that no row may hold."""

_DOCUMENTS_AT_ONCE: Final = 1 << 20


def read_report(path: Path) -> dict[str, Any]:
    """Return a report of `find`: the file, or that of its folder.

    Raises:
        InvalidParameter: there is none.
    """
    path = path / "report.json" if path.is_dir() else path
    try:
        report = parse_json(read_regular(path))
        if not isinstance(report["exclude"], dict) or not isinstance(report["corpora"], list):
            raise ValueError("it has other fields")
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = reason_of(error) if isinstance(error, OSError | ValueError) else "it has other fields"
        raise InvalidParameter(
            f"{path} is no report of corpus-server find: {why}",
            parameter="report",
            remedy="name the folder of find --out",
        ) from error
    return dict(report)


def excluded_by_report(report: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> Exclude:
    """Return what a report excludes of the corpora of a plan.

    Args:
        known: descriptions of these corpora, by name.

    Raises:
        InvalidParameter: one of them is another one here.
    """
    for each in report["corpora"]:
        if (corpus := known.get(each["corpus"])) is not None:
            _check_content(each["corpus"], {each["fingerprint"]}, corpus)
    return {name: ranges for name, ranges in report["exclude"].items() if name in known and ranges}


def excluded_by_path(
    spec: CorpusSpec, without: Path | None, known: Mapping[str, Mapping[str, Any]]
) -> Exclude:
    """Return the tokens of the documents of a list, or of those that the view of a spec does not hold.

    Raises:
        InvalidParameter: the plan does not read the corpus, or the list is not what it should be.
        UnknownDocument: the corpus has no document index.
        UnreadableCorpus: the corpus or the view cannot be read.
    """
    if spec.name not in known:
        raise InvalidParameter(
            f"the plan reads no corpus {spec.name!r}, but {', '.join(known)}",
            parameter="corpus",
            remedy="name it as the plan does: NAME=PATH",
        )
    if (without is None) == (spec.view is None):
        raise InvalidParameter(
            f"--corpus {spec.name} needs --without FILE, or a view in its path (PATH?view=FILE); not both",
            parameter="without",
        )
    with open_corpus(spec) as opened:
        corpus = opened.base
        if corpus.num_documents is None:
            raise corpus.no_documents(spec=spec)
        _check_content(spec.name, set(corpus.fingerprints.values()), known[spec.name])
        if without is not None:
            documents = np.unique(read_list("without", without, corpus.num_documents))
        else:
            documents = _not_in_view(Path(str(spec.view)), corpus)
        ranges = document_ranges(corpus, documents).tolist()
    return {spec.name: ranges} if ranges else {}


def successor(described: Mapping[str, Any], from_step: int, exclude: Exclude) -> dict[str, Any]:
    """Return the document of the plan that goes on without some tokens from a plan step on.

    It continues the plan by a stage, as `loader.extend` does. If the plan has later stages, the document is a
    whole plan. What a stage excludes is out in later stages, too.

    Args:
        described: what a server says of the plan.

    Raises:
        InvalidParameter: the plan has later stages, and continues another one.
    """
    last = described["stages"][-1]
    shape = {name: last[name] for name in ("global_batch_size", "seq_len")}
    if last["from_step"] < from_step:
        stage = {"from_step": from_step, **shape, "mixture": last["weights_65536"], "exclude": exclude}
        return {"parent": described["id"], "stages": [stage]}
    if "root" in described:
        raise InvalidParameter(
            f"plan {described['id'][:12]} has a stage from step {last['from_step']} on, and continues "
            "another plan: a stage can begin after it alone",
            parameter="at_step",
            received=from_step,
            remedy="name the plan that it continues, before that stage",
        )
    made = copy.deepcopy(dict(described["plan"]))
    stages = made["stages"]
    at = max(number for number, stage in enumerate(stages) if stage["from_step"] <= from_step)
    if stages[at]["from_step"] < from_step:
        stages.insert(at + 1, {**copy.deepcopy(stages[at]), "from_step": from_step, "exclude": {}})
        at += 1
    own = stages[at].get("exclude") or {}
    stages[at]["exclude"] = own | {name: sorted([*own.get(name, []), *exclude[name]]) for name in exclude}
    return made


def _check_content(name: str, fingerprints: set[str], known: Mapping[str, Any]) -> None:
    if not fingerprints & {*known["fingerprints"].values()}:
        raise InvalidParameter(
            f"corpus {name!r} has another content than that of the plan: {', '.join(sorted(fingerprints))}, "
            f"the server's is {known['fingerprint']}",
            parameter="corpus",
            remedy="name the corpus that the server has; of a view of a server, make another view instead",
        )


def _not_in_view(path: Path, corpus: Corpus) -> NDArray[np.int64]:
    """Return the documents of a corpus that a view of it does not hold, ascending."""
    assert corpus.num_documents is not None
    with ViewFile(path) as view:
        starts = range(0, corpus.num_documents, _DOCUMENTS_AT_ONCE)
        stops = (min(start + _DOCUMENTS_AT_ONCE, corpus.num_documents) for start in starts)
        found = [
            start + np.flatnonzero(view.decoded(start, stop) == 0)
            for start, stop in zip(starts, stops, strict=True)
        ]
    return np.concatenate([np.empty(0, np.int64), *found])
