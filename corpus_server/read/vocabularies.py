"""Whether the ids of a plan's corpora mean the same: their tokenizers, compared.

A batch that holds ids of two vocabularies trains, and means nothing. So a new plan over corpora whose
tokenizers differ is refused, unless it says `"tokenizers": "differ"`. A plan that was made before goes on:
its document has the fingerprints of all its corpora.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from corpus_server.corpus.corpus import Corpus
from corpus_server.errors import InvalidPlan
from corpus_server.plan import Plan
from corpus_server.plan.document import DIFFER, SAME

_SHOWN_NAMES = 4


def check_tokenizers(plan: Plan, corpora: Mapping[str, Corpus]) -> None:
    """Refuse a plan that mixes, for the first time, corpora whose tokenizers differ.

    Args:
        plan: bound; the corpora are its sources.

    Raises:
        InvalidPlan: naming two of them.
    """
    if plan.tokenizers == DIFFER or not plan.filled_in:
        return
    if (found := _difference(corpora, plan.filled_in)) is not None:
        raise InvalidPlan(
            found,
            parameter="tokenizers",
            received=plan.tokenizers,
            accepted=f"{SAME}, {DIFFER}",
            remedy='mix corpora of one tokenizer; or say that they differ, by "tokenizers": "differ" in a '
            'plan document or tokenizers="differ" of a loader, if you add an offset to the ids of each '
            "source, or if the files differ and the vocabulary is the same",
        )


def tokenizer_warnings(plan: Plan, corpora: Mapping[str, Corpus]) -> list[str]:
    """Return what should be known of the tokenizers of a plan that does not say that they differ."""
    if plan.tokenizers == DIFFER or len(corpora) < 2:
        return []
    if (found := _difference(corpora, corpora)) is not None:
        return [found]
    unknown = [name for name, corpus in corpora.items() if corpus.tokenizer_identity is None]
    if not unknown:
        return []
    names = ", ".join(unknown[:_SHOWN_NAMES])
    if len(unknown) > _SHOWN_NAMES:
        names += f" and {len(unknown) - _SHOWN_NAMES} more"
    return [
        f"the tokenizers of the plan's corpora could not be compared: that of {names} is not known; serve "
        "NAME=PATH,tokenizer=FILE to say it"
    ]


def _difference(corpora: Mapping[str, Corpus], among: Collection[str]) -> str | None:
    """Return which two corpora have different tokenizers, at least one of them `among` these; None if none.

    An id beyond the vocabulary of the other's tokenizer is a difference, too.
    """
    if len(corpora) < 2:
        return None
    first: dict[str, str] = {}  # identity -> the first corpus that has it
    for name, corpus in corpora.items():
        if corpus.tokenizer_identity is not None:
            first.setdefault(corpus.tokenizer_identity, name)
    for name in among if len(first) > 1 else ():
        if (identity := corpora[name].tokenizer_identity) is None:
            continue
        other = next(each for its, each in first.items() if its != identity)
        return f"corpora {_named(corpora, name)} and {_named(corpora, other)} have different tokenizers"
    sizes = {
        name: tokenizer.vocab_size
        for name in first.values()
        if (tokenizer := corpora[name].tokenizer) is not None
    }
    if not sizes:
        return None
    owner = min(sizes, key=sizes.__getitem__)
    for name, corpus in corpora.items():
        sampled = corpus.sampled_ids
        if sampled is None or sampled.largest < sizes[owner] or not {name, owner} & set(among):
            continue
        whose = "its own tokenizer" if name == owner else f"the tokenizer of corpus {_named(corpora, owner)}"
        return (
            f"corpus {name!r} holds token {sampled.largest}, but the ids of {whose} are below {sizes[owner]}"
        )
    return None


def _named(corpora: Mapping[str, Corpus], name: str) -> str:
    corpus = corpora[name]
    identity = str(corpus.tokenizer_identity)
    told = identity if corpus.tokenizer_name in {None, identity} else f"{corpus.tokenizer_name}, {identity}"
    return f"{name!r} ({told})"
