"""Drive a build: plan the job, run its parts, assemble the corpora, publish the folder."""

from __future__ import annotations

import dataclasses
import errno
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.progress import Progress
from corpus_server.corpus.publish import sync_folder
from corpus_server.corpus.tokenizers import eot_beside, open_tokenizer
from corpus_server.errors import InvalidParameter, UnreadableCorpus
from corpus_server.tools.building.assemble import assemble, origin_of
from corpus_server.tools.building.chats import find_chat
from corpus_server.tools.building.inputs import Found, find_inputs
from corpus_server.tools.building.job import PARTS, WHOLE, BuildOptions, Input, Job, Part, work_folder
from corpus_server.tools.building.manifest import Manifest, folders, read_manifest
from corpus_server.tools.building.part import PartResult, find_result
from corpus_server.tools.building.sources import check_first, plan_parts

RunParts = Callable[[Job, Sequence[Part], Path], Iterable[PartResult | int]]
"""Runs `build_part(job.options, part, folder)` for each part, anywhere, in any order; yields as they end.

Meanwhile it may yield how many bytes of input were read by now, about, also of parts that have not ended.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What a build read of its sources, and what it left out.

    Attributes:
        num_files, num_bytes: of the files that were read.
        documents_left_out: number of documents by the reason why they are not in the corpus.
        files_left_out: files of the sources' folders that were not read, and why.
        missing, doubled: sentences about files that seem to be missing, or to be there twice.
        dropped: a sentence about characters that are in no token, if there are any.
        num_rounded: weights of tokens that float16 holds only nearly.
    """

    num_files: int
    num_bytes: int
    num_documents: int
    documents_left_out: Mapping[str, int]
    files_left_out: Sequence[tuple[Path, str]]
    missing: Sequence[str]
    doubled: Sequence[str]
    dropped: str | None
    num_rounded: int

    @classmethod
    def of(cls, found: Found, results: Sequence[PartResult], manifests: Iterable[Manifest]) -> Reading:
        """Sum up the results of all parts."""
        documents: Counter[str] = Counter()
        for result in results:
            documents.update(result.left_out)
        return cls(
            num_files=len(found.inputs),
            num_bytes=sum(each.num_bytes for each in found.inputs),
            num_documents=sum(manifest.num_documents for manifest in manifests),
            documents_left_out=documents,
            files_left_out=found.left_out,
            missing=found.missing,
            doubled=found.doubled,
            dropped=_dropped(results),
            num_rounded=sum(split.num_rounded for result in results for split in result.splits.values()),
        )


class Built(NamedTuple):
    """What a build made.

    Attributes:
        corpora: manifests of the corpora in OUT by split; by None if there are no splits. Empty if a task has
            run its share.
        reading: None if nothing was read now: a task ran its share, or the corpus was there already.
    """

    corpora: dict[str | None, Manifest]
    reading: Reading | None = None


def _dropped(results: Sequence[PartResult]) -> str | None:
    if not (count := sum(result.num_dropped for result in results)):
        return None
    first = next(result.dropped_in for result in results if result.dropped_in is not None)
    return f"{count:,} characters are left out, as the tokenizer has no token for them; first {first}"


def ignore(*progress: object) -> None:
    """Report to nobody."""


# Text holds no NUL, and an id beyond 255 would double the size of every token.
_BYTES_EOT: Final = 0


def choose_options(
    *,
    tokenizer: str | None,
    eot: int | None,
    chat: str | None = None,
    chat_template: Path | None = None,
    **others: Any,
) -> BuildOptions:
    """Return the options of a build, with what the tokenizer says: its vocabulary, its end-of-text token.

    Args:
        chat: field with the messages of conversations.
        chat_template: file of the template that renders them, instead of the tokenizer's own.
        others: of `BuildOptions`.
    """
    opened = None if tokenizer is None else open_tokenizer(tokenizer)
    if opened is None and others.get("column") is None:
        accepted = (
            "'gpt2' or another model of the Hugging Face Hub, a tokenizer.json, a tiktoken rank file, "
            "a SentencePiece model or 'bytes'"
        )
        remedy = "for token ids name their column with --column"
        raise InvalidParameter.expected("tokenizer", accepted, None, remedy=remedy)
    if eot is None and opened is not None:
        eot = _BYTES_EOT if tokenizer == "bytes" else opened.eot_id
    if eot is None:
        known = "there is no tokenizer that names it" if opened is None else "the tokenizer names none"
        raise InvalidParameter(
            f"no end-of-text token is known, because {known}; give its id with --eot", parameter="eot"
        )
    if tokenizer not in (None, "bytes"):
        tokenizer = str(Path(tokenizer).absolute())
    vocab_size = None if opened is None else opened.vocab_size
    found = None
    if chat is not None:
        if opened is None or opened.encode_marked_up("") is None:
            raise InvalidParameter.expected("tokenizer", "a tokenizer.json with chat", tokenizer)
        found = find_chat(chat, Path(str(tokenizer)), chat_template)
    elif chat_template is not None:
        raise InvalidParameter.expected("chat_template", "left out without chat", str(chat_template))
    return BuildOptions(tokenizer=tokenizer, eot=eot, vocab_size=vocab_size, chat=found, **others)


def name_of(tokenizer: str | None, token: int) -> str | None:
    """Return the text of a token; None if no tokenizer knows the token, or it is no text by itself."""
    if tokenizer is None or not (opened := open_tokenizer(tokenizer)).knows(token):
        return None
    name = opened.decode([token])
    return None if "\ufffd" in name else name


def eot_disagreement(options: BuildOptions) -> str | None:
    """Say that a file beside the tokenizer names another end-of-text token than the one that was chosen."""
    path = options.tokenizer_file
    if path is None or (found := eot_beside(path)) is None:
        return None
    chosen, (name, source) = name_of(options.tokenizer, options.eot), found
    if name == chosen:
        return None
    return (
        f"documents end with token {options.eot} {chosen!a}, but {source} beside the tokenizer says "
        f"{name!a}: choose the other one with --eot, or say --eot to confirm"
    )


def build(
    sources: Sequence[str],
    out: Path,
    options: BuildOptions,
    run_parts: RunParts,
    report: Progress = ignore,
    *,
    include: Sequence[str] = (),
    fresh: bool = False,
    task: tuple[int, int] | None = None,
) -> Built:
    """Build the corpus `out`, or continue where a build of it was interrupted.

    Nothing is at `out` until the corpus is whole; the work lies in `out.building` beside it. A build that was
    completed before is left as it is.

    Args:
        include: see `find_inputs`.
        fresh: forget an unfinished build, instead of continuing it.
        task: K and N, to run only share K of N of the parts, at the same time as other shares. A build
            without it then finds these parts done.

    Raises:
        InvalidParameter: `out` exists, or its work folder holds another job.
        UnreadableCorpus: a source cannot be read or was changed meanwhile, or the disk refuses.
    """
    found = find_inputs(sources, include)
    inputs = _with_tokenizer(found, options)
    work = work_folder(out)
    with _writing(work):
        if fresh and work.is_dir():
            shutil.rmtree(work)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            return Built(_built_before(out, work, options, inputs))
        job = _begin(work, options, inputs)
        number, count = task or (0, 1)
        results = _run(job, job.parts[number::count], work, run_parts, report)
        if task is not None:
            return Built({})
        if changed := {*job.inputs} ^ {*_with_tokenizer(find_inputs(sources, include), options)}:
            paths = sorted(each.path for each in changed)
            raise unreadable(Path(paths[0]), "was changed while it was read", "say --fresh to build anew")
        manifests = assemble(job, results, work, report)
        (work / WHOLE).rename(out)
        sync_folder(out.parent)
        shutil.rmtree(work)
    return Built(manifests, Reading.of(found, results, manifests.values()))


def _begin(work: Path, options: BuildOptions, inputs: tuple[Input, ...]) -> Job:
    """Return the job in the folder `work`, after checking that it is this one, or begin it there."""
    sources = inputs if options.tokenizer_file is None else inputs[:-1]
    while (job := Job.load(work)) is None:
        check_first(sources, options)
        (work / PARTS).mkdir(parents=True, exist_ok=True)
        try:
            Job(options=options, inputs=inputs, parts=plan_parts(sources)).save(work)
        except BlockingIOError:  # all tasks of an array begin at once, and another one is saving it
            time.sleep(0.1)
    job.check_same(options, inputs, work)
    return dataclasses.replace(job, options=options)


def _run(
    job: Job, parts: Sequence[Part], work: Path, run_parts: RunParts, report: Progress
) -> list[PartResult]:
    """Run those of the parts that are not done yet; return the results of all, in order."""
    folder = work / PARTS
    results = {part.number: find_result(part, folder) for part in parts}
    missing = [part for part in parts if results[part.number] is None]
    num_bytes = sum(part.num_bytes for part in parts)
    before = num_bytes - sum(part.num_bytes for part in missing)
    done = read = num_tokens = 0
    report("starting", before, num_bytes, 0)  # processes import for a second or two
    for result in run_parts(job, missing, folder):
        if isinstance(result, int):
            read = result
        else:
            results[result.number] = result
            done, num_tokens = done + result.num_bytes, num_tokens + result.num_tokens
        if done or read:
            report("tokenizing", before + max(done, read), num_bytes, num_tokens)
    return [result for result in results.values() if result is not None]


def _with_tokenizer(found: Found, options: BuildOptions) -> tuple[Input, ...]:
    """Return the sources' files, and behind them the tokenizer's."""
    inputs, path = found.inputs, options.tokenizer_file
    return inputs if path is None else (*inputs, dataclasses.replace(Input.of(path), name=path.name))


def _built_before(
    out: Path, work: Path, options: BuildOptions, inputs: tuple[Input, ...]
) -> dict[str | None, Manifest]:
    """Return the manifests of `out` if this build made it; it may have been killed before it could say so."""
    with suppress(UnreadableCorpus):
        manifests = {split: read_manifest(folder) for split, folder in folders(out).items()}
        origin = origin_of(options, inputs, ignore)
        if all(manifest.origins == (origin,) for manifest in manifests.values()):
            shutil.rmtree(work, ignore_errors=True)
            return manifests
    remedy = "what is there was made of other sources or by other options: choose another name, or remove it"
    raise InvalidParameter.expected("out", "a folder that does not exist yet", str(out), remedy=remedy)


@contextmanager
def _writing(work: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"the build cannot be written: {error.strerror or error}"
        if isinstance(error, BlockingIOError):
            remedy = "wait until it is done"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "make room; the same command continues the build"
        else:
            remedy = "check the folder and its permissions, or give another --out"
        raise unreadable(work, what, remedy) from error
