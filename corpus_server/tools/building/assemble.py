"""Make whole corpora of finished parts: shards, tokenizer, hashes and, last of all, the manifest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from fnmatch import fnmatch
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from corpus_server import __version__
from corpus_server.corpus.formats.layout import Ends
from corpus_server.corpus.formats.masks import sent_as
from corpus_server.corpus.opening import open_shards
from corpus_server.corpus.progress import Meter, Progress
from corpus_server.corpus.publish import publishing, sync_folder
from corpus_server.corpus.tokenizers import FILE_NAMES
from corpus_server.corpus.verify import record
from corpus_server.errors import InvalidParameter, counted
from corpus_server.tools.building.job import PARTS, SKIPPED, WHOLE, BuildOptions, Input, Job, smallest_dtype
from corpus_server.tools.building.joining import SplitTokens, cuts, write_shards
from corpus_server.tools.building.kept import write_metadata
from corpus_server.tools.building.manifest import (
    Manifest,
    ManifestShard,
    Origin,
    Source,
    file_digest,
    spec_of,
    write_manifest,
)
from corpus_server.tools.building.part import PartResult
from corpus_server.user_files import read_regular


def assemble(
    job: Job, results: Sequence[PartResult], work: Path, report: Progress
) -> dict[str | None, Manifest]:
    """Write shards, document ends, hashes, tokenizer and manifests of all splits to the folder `WHOLE`.

    Documents that were left out because of an error are listed there, in a file beside the splits.
    """
    options = job.options
    splits = {name: SplitTokens(options, results, name, work / PARTS) for name in options.split_names}
    if empty := [name for name, tokens in splits.items() if not tokens.num_tokens]:
        num_documents = sum(tokens.num_documents for tokens in splits.values())
        raise InvalidParameter(
            f"split {empty[0]!r} got none of {counted(num_documents, 'document')}"
            if num_documents
            else "the sources hold no document that has a token",
            remedy="give it a larger share, and say --fresh" if num_documents else None,
        )
    dtype = options.part_dtype
    if options.vocab_size is None:
        largest = (split.largest_id for result in results for split in result.splits.values())
        dtype = smallest_dtype(max(options.eot, *largest))
    origin = origin_of(options, job.inputs, report)
    if skipped := [line for result in results for line in result.skipped]:
        (work / WHOLE).mkdir(exist_ok=True)
        with publishing(work / WHOLE / SKIPPED) as file:
            file.write("".join(f"{line}\n" for line in skipped).encode())
    num_bytes = dtype.itemsize * sum(tokens.num_tokens for tokens in splits.values())
    written = Meter("joining", num_bytes, report)
    manifests: dict[str | None, Manifest] = {}
    for name, documents in splits.items():
        folder = work / WHOLE / name if options.splits else work / WHOLE
        folder.mkdir(parents=True, exist_ok=True)
        write_shards(
            documents,
            folder,
            dtype=dtype,
            eot=options.eot,
            shard_tokens=options.shard_tokens,
            written=written,
        )
        if options.keep:
            ends = cuts(documents.ends(0, documents.num_tokens), options.shard_tokens)
            write_metadata(_counted(documents, report), documents.kept, folder, ends)
        split = name if options.splits else None
        manifests[split] = _describe(folder, split, documents, origin, options, report)
    sync_folder(work / WHOLE)
    return manifests


def _counted(documents: SplitTokens, report: Progress) -> Iterator[Ends]:
    """Yield the ends of all documents; report as much of the kept fields as those documents' share."""
    num_bytes = sum(path.stat().st_size for path in documents.kept)
    meter = Meter("metadata", num_bytes, report)
    for ends in documents.ends(0, documents.num_tokens):
        yield ends
        meter.add(num_bytes * ends.size // documents.num_documents)


def _describe(
    folder: Path,
    split: str | None,
    documents: SplitTokens,
    origin: Origin,
    options: BuildOptions,
    report: Progress,
) -> Manifest:
    """Add the tokenizer, the hashes and, last of all, the manifest to the shards of a corpus."""
    tokenizer: Source | Literal["bytes"] | None = "bytes" if options.tokenizer == "bytes" else None
    if (source := options.tokenizer_file) is not None:
        path = folder / _tokenizer_name(source)
        with publishing(path) as file:
            file.write(read_regular(source))
        tokenizer = Source(path=path.name, num_bytes=path.stat().st_size, digest=file_digest(path))
    spec = spec_of(folder)
    recorded = record(spec, progress=report)
    with ExitStack() as opened:
        shards = open_shards(spec, opened)
        described = tuple(
            ManifestShard(
                name=shard.name,
                num_tokens=shard.num_tokens,
                num_documents=0 if shard.documents is None else shard.documents.num_documents,
                num_bytes=shard.size_bytes,
            )
            for shard in shards
        )
    manifest = Manifest(
        split=split,
        fingerprint=recorded.fingerprints["full"],
        dtype=shards[0].dtype.name,
        eot=options.eot,
        tokenizer=tokenizer,
        num_tokens=recorded.num_tokens,
        num_documents=documents.num_documents,
        shards=described,
        origins=(origin,),
        num_targets=None if documents.mask_dtype is None else documents.num_targets,
        loss_mask_dtype=None if documents.mask_dtype is None else sent_as(documents.mask_dtype),
    )
    write_manifest(folder, manifest)
    return manifest


def _tokenizer_name(path: Path) -> str:
    """Return the name under which servers find a tokenizer beside shards."""
    if any(fnmatch(path.name, pattern) for pattern in FILE_NAMES):
        return path.name
    return "tokenizer.json" if path.suffix == ".json" else "tokenizer.model"


def origin_of(options: BuildOptions, inputs: Sequence[Input], report: Progress) -> Origin:
    """Return what the manifest says of this build. Reads all inputs once more, for their digests."""
    said = json.loads(json.dumps(dataclasses.asdict(options)))  # as it is read back, with lists
    if options.tokenizer is not None:
        said["tokenizer"] = Path(options.tokenizer).name
    versions = {"corpus-server": __version__}
    for package in ("tokenizers", "tiktoken", "sentencepiece", "pyarrow"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    sources = []
    hashed = Meter("hashing sources", sum(each.num_bytes for each in inputs), report)
    for each in inputs:
        digest = file_digest(Path(each.path), hashed)
        sources.append(Source(path=each.name, num_bytes=each.num_bytes, digest=digest))
    return Origin(options=said, sources=tuple(sources), versions=versions)
