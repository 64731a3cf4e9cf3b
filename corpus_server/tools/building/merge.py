"""Join built corpora: hard links to their shards, and one manifest. No token is moved.

The recorded digests of the corpora, one after another, are those of the merged one. So its full fingerprint
is known without reading the shards.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.fingerprints import (
    RecordedHashes,
    ShardHashes,
    check_fingerprints,
    sampled_fingerprint,
    save_sidecar,
)
from corpus_server.corpus.formats.documents import documents_path
from corpus_server.corpus.formats.masks import MASK_DTYPE, WEIGHT_DTYPE, mask_name, sent_as
from corpus_server.corpus.metadata import DocumentTable
from corpus_server.corpus.metadata.files import FileDigest, files_in, known_digests, save_digests
from corpus_server.corpus.opening import open_shards
from corpus_server.corpus.publish import publishing_folder
from corpus_server.corpus.selection import METADATA_FOLDER
from corpus_server.corpus.shards import Shard, contents
from corpus_server.errors import InvalidParameter, counted
from corpus_server.tools.building.manifest import (
    Manifest,
    ManifestShard,
    Source,
    check_hashes,
    folders,
    read_manifest,
    spec_of,
    write_manifest,
)

# A link cannot cross file systems, some file systems have none, and a file can have only so many.
_NO_LINK: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Built:
    """One of the corpora to join, open."""

    folder: Path
    manifest: Manifest
    hashes: RecordedHashes
    shards: Sequence[Shard]


def merge(paths: Sequence[Path], out: Path, *, copy: bool = False) -> dict[str | None, Manifest]:
    """Publish the folder `out` with the shards of all built corpora in `paths`, in that order.

    Corpora that were divided into splits are joined split by split. `copy` copies the shards, for an `out` on
    another file system, or while a server has them open: to a server a new link is a change of the file.

    Returns:
        The manifests of the merged corpora, by split.

    Raises:
        InvalidParameter: the corpora do not belong together, or `out` exists.
        UnreadableCorpus: one is damaged or was not built, or a link is not possible; nothing is published.
    """
    if out.exists():
        remedy = "choose another name, or remove it"
        raise InvalidParameter.expected("out", "a folder that does not exist yet", str(out), remedy=remedy)
    found = [folders(path) for path in paths]
    for path, splits in zip(paths, found, strict=True):
        if set(splits) != set(found[0]):
            raise InvalidParameter(
                f"corpora must have the same splits, {paths[0]} has {_names(found[0])}, {path} has "
                f"{_names(splits)}",
                remedy="name the folders of the splits that belong together",
            )
    merged = {}
    try:
        with publishing_folder(out) as folder:
            for split in found[0]:
                target = folder if split is None else folder / split
                target.mkdir(exist_ok=True)
                with ExitStack() as opened:
                    merged[split] = _merge([_open(each[split], opened) for each in found], target, copy=copy)
    except OSError as error:
        raise unreadable(
            out, f"cannot be written: {error.strerror}", "make room, or give another out"
        ) from error
    return merged


def _open(folder: Path, opened: ExitStack) -> _Built:
    manifest = read_manifest(folder)
    shards = open_shards(spec_of(folder), opened)
    hashes = check_hashes(folder, manifest)
    check_fingerprints(spec_of(folder), contents(shards))
    if [shard.name for shard in shards] != [shard.name for shard in manifest.shards]:
        what = (
            f"holds {counted(len(shards), 'shard')}, its manifest names {len(manifest.shards)} or other ones"
        )
        raise unreadable(folder, what, "copy the folder again, with all its files")
    return _Built(folder=folder, manifest=manifest, hashes=hashes, shards=shards)


def _merge(corpora: Sequence[_Built], folder: Path, *, copy: bool) -> Manifest:
    _check_alike(corpora)
    sampled = sampled_fingerprint(contents(shard for corpus in corpora for shard in corpus.shards))
    for corpus in corpora:
        for shard in corpus.shards:
            shard.close()  # a new link is a change of a file that is open
    shards: list[ManifestShard] = []
    digests: list[ShardHashes] = []
    for corpus in corpora:
        hashes_left = iter(corpus.hashes.shards)  # of each shard, and of its loss mask behind it
        for shard, described in zip(corpus.shards, corpus.manifest.shards, strict=True):
            # Numbered anew: the order of shards is the order of their names.
            name = f"{len(shards):06}{shard.path.suffix}"
            _place(shard.path, folder / name, copy=copy)
            _place(documents_path(shard.path), documents_path(folder / name), copy=copy)
            shards.append(replace(described, name=name))
            digests.append(replace(next(hashes_left), name=name))
            if shard.mask is not None:
                _place(shard.mask.path, folder / mask_name(name), copy=copy)
                digests.append(replace(next(hashes_left), name=mask_name(name)))
    first = corpora[0].manifest
    if isinstance(first.tokenizer, Source):
        _place(corpora[0].folder / first.tokenizer.path, folder / first.tokenizer.path, copy=copy)
    _merge_metadata(corpora, folder, copy=copy)
    hashes = RecordedHashes(sampled=sampled, shards=tuple(digests))
    save_sidecar(spec_of(folder), hashes)
    masked = [each.manifest for each in corpora if each.manifest.num_targets is not None]
    num_targets, mask_dtype = None, None
    if masked:  # all tokens of a corpus without masks are targets
        targets = (each.manifest.num_targets for each in corpora)
        tokens = (each.manifest.num_tokens for each in corpora)
        num_targets = sum(total if its is None else its for its, total in zip(targets, tokens, strict=True))
        has_weights = any(each.loss_mask_dtype == "float16" for each in masked)
        mask_dtype = sent_as(WEIGHT_DTYPE if has_weights else MASK_DTYPE)
    manifest = replace(
        first,
        num_targets=num_targets,
        loss_mask_dtype=mask_dtype,
        fingerprint=hashes.full,
        num_tokens=sum(each.manifest.num_tokens for each in corpora),
        num_documents=sum(each.manifest.num_documents for each in corpora),
        shards=tuple(shards),
        origins=tuple(origin for each in corpora for origin in each.manifest.origins),
    )
    write_manifest(folder, manifest)
    return manifest


def _merge_metadata(corpora: Sequence[_Built], folder: Path, *, copy: bool) -> None:
    """Place the metadata of all corpora, one after another, or of none."""
    found = {corpus.folder: files_in(corpus.folder / METADATA_FOLDER) for corpus in corpora}
    if not any(found.values()):
        return
    if without := [path for path, files in found.items() if not files]:
        having = next(path for path, files in found.items() if files)
        raise InvalidParameter(
            f"corpora must all have metadata of documents or none: {having} has some, {without[0]} has none",
            remedy="attach some with corpus-server index --metadata, or remove the folder documents",
        )
    target = folder / METADATA_FOLDER
    target.mkdir()
    digests: list[FileDigest] = []
    for corpus in corpora:
        files = found[corpus.folder]
        DocumentTable(files, sum(shard.num_documents for shard in corpus.manifest.shards)).close()
        for path, its in zip(files, known_digests(files), strict=True):
            name = f"{len(digests):06}.parquet"
            _place(path, target / name, copy=copy)
            digests.append(replace(its, name=name))
    save_digests(target, digests)


def _place(source: Path, target: Path, *, copy: bool) -> None:
    """Make `target` a hard link to `source`, or a copy of it."""
    try:
        if copy:
            shutil.copyfile(source, target)
            with target.open("rb") as file:
                os.fsync(file.fileno())
        else:
            os.link(source, target)
    except OSError as error:
        remedy = "make room, or give out on another disk"
        if not copy and error.errno in _NO_LINK:
            remedy = "give out on the same file system, or copy the shards with --copy"
        what = f"cannot be {'copied' if copy else 'linked'} to {target.parent}: {error.strerror}"
        raise unreadable(source, what, remedy) from error


def _names(splits: Mapping[str | None, Path]) -> str:
    return ", ".join(name for name in splits if name is not None) or "none"


def _check_alike(corpora: Sequence[_Built]) -> None:
    """Refuse corpora that do not belong together, and the same tokens twice."""
    if len(splits := {corpus.manifest.split for corpus in corpora} - {None}) > 1:
        raise InvalidParameter(
            f"corpora must be of one split, got {', '.join(sorted(map(str, splits)))}",
            remedy="merge each split by itself: training data would hold held-out documents",
        )
    first = _character(corpora[0].manifest)
    for corpus in corpora[1:]:
        for what, its in _character(corpus.manifest).items():
            if its != first[what]:
                raise InvalidParameter(
                    f"corpora must have one {what}: that of {corpora[0].folder} is {first[what]}, that of "
                    f"{corpus.folder} is {its}",
                    remedy="build one of them again, or serve both and mix them in a plan",
                )
    seen: dict[str, Path] = {}
    for corpus in corpora:
        if (earlier := seen.get(corpus.manifest.fingerprint)) is not None:
            raise InvalidParameter(
                f"{corpus.folder} holds the same tokens as {earlier}",
                remedy="name one of them; the weights of a mixture say how often a corpus is read",
            )
        seen[corpus.manifest.fingerprint] = corpus.folder


def _character(manifest: Manifest) -> dict[str, str | int]:
    tokenizer = manifest.tokenizer
    return {
        "tokenizer": f"{tokenizer.path} ({tokenizer.digest})"
        if isinstance(tokenizer, Source)
        else str(tokenizer),
        "dtype": manifest.dtype,
        "end-of-text token": manifest.eot,
    }
