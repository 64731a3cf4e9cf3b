"""The plan of a configuration that was read, as all readers make it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final, Literal

from corpus_server.corpus_spec import escaped
from corpus_server.errors import InvalidParameter

DEFAULT_SPLIT: Final = "969, 30, 1"
"""Shares of the documents where a configuration of Megatron or GPT-NeoX says none."""
ACROSS: Final = "samples across document and file ends: a window lies inside one file, in file order"
_RANKS: Final = "which rank and micro batch has which row: each step has the same rows in all"


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """A plan from another trainer's configuration."""

    document: Mapping[str, Any]  # the plan's JSON
    corpora: Mapping[str, str]  # by the name in the plan, path and options as `serve` takes them
    left_out: Sequence[str]  # what is not carried over, a sentence each


def imported(
    sources: Sequence[tuple[Sequence[str], float]],
    said: Mapping[str, int],
    left_out: Sequence[str],
    *,
    names: Sequence[str] = (),
    options: str = "",
    are_rows: bool = False,
    order: str | Mapping[str, Any] = "shuffle",
) -> Imported:
    """Return the plan. With `are_rows`, samples are disjoint, `seq_len + 1` tokens each.

    Args:
        sources: paths and weight of each.
        options: of each corpus, as `serve` takes them.
    """
    if not sources:
        raise InvalidParameter.expected("data", "the paths of tokens", None)
    for name, option in (("seq_len", "--seq-len"), ("batch_size", "--batch-size")):
        if name not in said:
            raise InvalidParameter(
                f"the configuration does not say {name}", parameter=name, remedy=f"give it with {option}"
            )
    corpora: dict[str, str] = {}
    mixture: dict[str, float] = {}
    for number, (paths, weight) in enumerate(sources):
        stem = names[number] if names else PurePosixPath(paths[0]).name.removesuffix("_text_document")
        name = base = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._") or "corpus"
        again = itertools.count(1)
        while name in corpora:
            name = f"{base}-{next(again)}"
        corpora[name], mixture[name] = ",".join(map(escaped, paths)) + options, weight
    stride = said["seq_len"] + 1 if are_rows else said["seq_len"]
    document = {
        "seq_len": said["seq_len"],
        "stride": stride,
        "seed": said["seed"],
        "order": order,
        "stages": [{"from_step": 0, "global_batch_size": said["batch_size"], "mixture": mixture}],
    }
    told = list(left_out)
    if order == "shuffle":
        told.append("the order: a plan shuffles by a permutation of its own")
    if are_rows:
        told.append("a sample's last token is a target only: samples of L tokens are rows of seq_len L - 1")
    return Imported(document=document, corpora=corpora, left_out=told)


def with_samples(
    sources: Sequence[tuple[Sequence[str], float]],
    said: Mapping[str, int],
    left_out: Sequence[str],
    *,
    trainer: Literal["megatron", "neox"],
    num_samples: int,
    split: Sequence[float],
    is_blend: bool,
) -> Imported:
    """Return the plan in the order of a trainer's samples.

    Args:
        num_samples: of the run.
        split: shares of the documents.
        is_blend: whether the trainer draws by the weights of the sources.
    """
    order: dict[str, Any] = {"num_samples": num_samples}
    if is_blend:
        order["weights"] = [weight for _, weight in sources]
    order["split"] = list(split)
    made = imported(sources, said, [*left_out, _RANKS], order={trainer: order})
    order["blend"] = list(made.corpora)
    return made


def unread(table: Mapping[str, Any], read: set[str], where: str) -> list[str]:
    """Return a sentence about the fields of a table that are not read, if there are some."""
    names = sorted(name for name, value in table.items() if name not in read and value is not None)
    return [f"{where}: {', '.join(names)}"] if names else []


def too_little_said(maker: str, remedy: str) -> InvalidParameter:
    """Return the error for a run whose number of samples is not known."""
    return InvalidParameter(
        f"the configuration does not say how many samples the run has, on which {maker}'s order depends",
        parameter="num_samples",
        remedy=f"give {remedy}, or the option --num-samples",
    )
