"""What a built corpus consists of and what it was made from: `manifest.json` in its folder.

The manifest is written last: a folder that has one is whole. Digests of all blocks are not in it but in the
recorded hashes beside it (`corpus.hashes.json`), where `corpus-server verify` looks for those of any corpus.
The manifest's fingerprint is made of them, so it vouches for every token.

A manifest says nothing that differs between two builds of the same corpus: no times, hosts or processes.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeVar, cast

import xxhash

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.fingerprints import RecordedHashes, load_sidecar
from corpus_server.corpus.progress import Meter
from corpus_server.corpus.publish import publishing
from corpus_server.corpus_spec import MANIFEST, CorpusSpec
from corpus_server.user_files import open_regular, parse_json, read_regular

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic import TypeAdapter

_T = TypeVar("_T")


class Strict:
    """Base of what is kept as JSON."""

    __slots__ = ()
    # A field of a newer version must not be lost in silence.
    __pydantic_config__: ClassVar = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source(Strict):
    """A file that a corpus was made from: input text, or a tokenizer."""

    path: str  # as the user named it, or below the folder that the user named
    num_bytes: int
    digest: str  # `file_digest` of its content


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin(Strict):
    """One run of `corpus-server build`. A merged corpus has several."""

    options: dict[str, Any]
    sources: tuple[Source, ...]
    versions: dict[str, str]  # of this package and of the libraries that read and tokenized


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestShard(Strict):
    """A shard, as its file and the recorded hashes describe it too."""

    name: str
    num_tokens: int
    num_documents: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest(Strict):
    """See the module.

    Attributes:
        split: which split of its origins the corpus is; None if they were not divided.
        tokenizer: `bytes`; or the tokenizer's file, which lies in the folder under this name; None if the
            corpus was made from ids and nobody named a tokenizer.
        packing: None. Corpora whose documents lie in padded rows were built by another release.
        num_targets: tokens that are targets of training, as the loss masks say; None without masks.
        loss_mask_dtype: `uint8` if these hold 0 and 1, `float16` if one of them holds weights.
        fingerprint: `full-<64 hex>`.
    """

    kind: Literal["corpus-manifest"] = "corpus-manifest"
    version: Literal[1] = 1
    split: str | None
    fingerprint: str
    dtype: str
    eot: int
    tokenizer: Source | Literal["bytes"] | None
    packing: None = None
    num_tokens: int
    num_documents: int
    shards: tuple[ManifestShard, ...]
    origins: tuple[Origin, ...]
    num_targets: int | None = None
    loss_mask_dtype: Literal["uint8", "float16"] | None = None


def spec_of(folder: Path) -> CorpusSpec:
    """Return the corpus in a folder that `build` wrote, for what reads any corpus."""
    return CorpusSpec(name="built", path=folder)


def write_json(path: Path, value: DataclassInstance) -> None:
    """Publish a dataclass as a JSON file; paths in it may hold any bytes."""
    with publishing(path) as file:
        file.write(json.dumps(dataclasses.asdict(value)).encode())


def read_json(kind: type[_T], path: Path, name: str, remedy: str) -> _T | None:
    """Return the dataclass that a JSON file holds, None if there is no file.

    Raises:
        UnreadableCorpus: the file cannot be read or holds something else than a `name`, which has a `remedy`.
    """
    from pydantic import ValidationError  # the command line starts without it

    try:
        found: _T = _adapter(cast("Any", kind)).validate_python(parse_json(read_regular(path)))
        return found
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, f"cannot be read: {error.strerror}", "check its permissions") from error
    except ValueError as error:
        what = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            what = f"{'.'.join(map(str, first['loc'])) or 'the text'}: {first['msg']}"
        raise unreadable(path, f"is no {name} of version 1: {what}", remedy) from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Publish the manifest of the corpus in `folder`."""
    with publishing(folder / MANIFEST) as file:
        file.write(_adapter(Manifest).dump_json(manifest, indent=1) + b"\n")


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the corpus in `folder`; its shards are not opened."""
    remedy = "copy the file again, or use the release that wrote it"
    if (found := read_json(Manifest, folder / MANIFEST, "manifest", remedy)) is None:
        what = f"expected a corpus that corpus-server build made: it has no {MANIFEST}"
        raise unreadable(folder, what, "name the folder that build wrote, or build the corpus")
    return found


def check_hashes(folder: Path, manifest: Manifest) -> RecordedHashes:
    """Return the recorded hashes of the corpus in `folder`, for which its manifest was written."""
    hashes = load_sidecar(spec_of(folder))
    if hashes is None or hashes.full != manifest.fingerprint:
        found = "there are none" if hashes is None else f"they give {hashes.full[:17]}..."
        what = f"expected recorded hashes that give {manifest.fingerprint[:17]}..., {found}"
        raise unreadable(folder, what, "copy the folder again, with all its files")
    return hashes


_DIGEST_BYTES: Final = 1 << 18


def file_digest(path: Path, meter: Meter | None = None) -> str:
    """Return `xxh3-128=<32 hex>` of a file's content, read in small pieces."""
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        while piece := file.read(_DIGEST_BYTES):
            digest.update(piece)
            if meter is not None:
                meter.add(len(piece))
    return f"xxh3-128={digest.hexdigest()}"


def folders(path: Path) -> dict[str | None, Path]:
    """Return the folders of the built corpora in `path` by split; None stands for a corpus without splits.

    `path` is what `build` wrote, one split of it, or the manifest of either.
    """
    if path.name == MANIFEST and path.is_file():
        path = path.parent
    if (path / MANIFEST).exists() or not path.is_dir():
        return {None: path}
    return {each.parent.name: each.parent for each in sorted(path.glob(f"*/{MANIFEST}"))} or {None: path}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
