"""Open the shards of a corpus, and find what they and the user say of its end-of-text token."""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, Final

import numpy as np

from corpus_server.corpus.files import Files, OpenFile, unreadable
from corpus_server.corpus.formats.layout import token_dtype
from corpus_server.corpus.formats.registry import data_path, find_mask
from corpus_server.corpus.selection import ShardFile, list_shards
from corpus_server.corpus.shards import Shard, open_runs
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter
from corpus_server.pieces import split

_MAX_OPEN_FILES: Final = 1 << 20


def file_opener(
    spec: CorpusSpec, *, sidecars: bool = True, files: Files | None = None
) -> Callable[[ShardFile], list[Shard]]:
    """Return a function that opens a file of the corpus, see `open_runs`."""
    _allow_open_files()
    options: dict[str, Any] = {
        "dtype": None if spec.dtype is None else token_dtype(spec.dtype),
        "in_folder": data_path(spec.path).is_dir(),
        "sidecar": sidecars,
        "masks": sidecars and spec.mask,
        "open_file": OpenFile if files is None else files.open,
    }
    return lambda file: open_runs(file.path, name=file.name, **options)


def open_shards(
    spec: CorpusSpec, opened: ExitStack, *, sidecars: bool = True, files: Files | None = None
) -> list[Shard]:
    """Open every shard of a corpus; `opened` closes them, also those opened before an error."""
    open_file, listed = file_opener(spec, sidecars=sidecars, files=files), list_shards(spec)
    if files is not None:
        masks = [find_mask(file.path) for file in listed] if spec.mask else []
        files.prepare([*(file.path for file in listed), *(mask for mask in masks if mask is not None)])
    shards = [opened.enter_context(run) for file in listed for run in open_file(file)]
    return shards if spec.token_range is None else cut_shards(shards, spec.token_range)


def cut_shards(shards: Sequence[Shard], token_range: tuple[int, int]) -> list[Shard]:
    """Return the shards that hold tokens [start, stop) of the corpus, cut to them; close the others."""
    starts = (0, *accumulate(shard.num_tokens for shard in shards))
    if token_range[1] > starts[-1]:
        accepted = f"within the {starts[-1]} tokens of the files"
        raise InvalidParameter.expected("token_range", accepted, list(token_range))
    places = split(np.array(starts), *(np.array([each]) for each in token_range)).places.tolist()
    pieces = {number: (start, start + count) for number, start, count in places}
    for number, shard in enumerate(shards):
        if number in pieces:
            shard.cut(*pieces[number])
        else:
            shard.close()
    return [shards[number] for number in pieces]


def _allow_open_files() -> None:
    """Raise the soft limit of open files to the hard one: the usual 1,024 are for programs with select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_eot(eot: int, shards: Sequence[Shard]) -> None:
    """Raise InvalidParameter if no token of the shards can have the id `eot`."""
    most = max(int(np.iinfo(shard.dtype).max) for shard in shards)
    if not 0 <= eot <= most:
        names = ", ".join(sorted({shard.dtype.name for shard in shards}))
        raise InvalidParameter.expected("eot", f"a token id in [0, {most}] ({names} tokens)", eot)


def find_eot(spec: CorpusSpec, shards: Sequence[Shard]) -> int | None:
    """Return the end-of-text id that the user or the sidecars say; refuse two that differ."""
    made = {shard.eot: shard.name for shard in shards if shard.eot is not None}
    if len(made) > 1:
        (one, first), (other, second), *_ = sorted(made.items())
        raise unreadable(
            spec.path,
            f"the documents of {first} end at token {one}, those of {second} at token {other}",
            "was indexing interrupted? Run corpus-server index --force on the corpus again",
        )
    if spec.eot is None:
        return next(iter(made), None)
    check_eot(spec.eot, shards)
    if made and spec.eot not in made:
        (one, first), *_ = made.items()
        raise unreadable(
            spec.path,
            f"eot is {spec.eot}, but the documents of {first} end at token {one}",
            "leave eot out, or run corpus-server index --force on the corpus",
        )
    return spec.eot


def find_place(spec: CorpusSpec, shards: Sequence[Shard]) -> bool:
    """Return whether documents begin with end-of-text; refuse what contradicts the sidecars."""
    made = {shard.eot_first: shard.name for shard in shards if shard.eot is not None}
    words = {True: "begin", False: "end"}
    if len(made) > 1:
        raise unreadable(
            spec.path,
            f"the documents of {made[True]} begin with end-of-text, those of {made[False]} end with it",
            "was indexing interrupted? Run corpus-server index --force on the corpus again",
        )
    said = None if spec.eot_at is None else spec.eot_at == "first"
    if made and said is (not next(iter(made))):
        ((place, name),) = made.items()
        raise unreadable(
            spec.path,
            f"eot_at is {spec.eot_at}, but the documents of {name} {words[place]} with end-of-text",
            "leave eot_at out, or run corpus-server index on the corpus again",
        )
    if said is not None:
        return said
    return next(iter(made), all(shard.eot_first for shard in shards))
