"""Which files hold the metadata of a corpus, and the digest of their bytes that is kept beside them.

    web/documents/000000.parquet    a row for each document, in the order of the corpus
    web/documents/digest.json       digests of these files, computed once; no part of the corpus's fingerprint

A selection of a folder's shards may have metadata of its own: `web#train` that in `documents.train`, the
file `web/val.bin` that in `documents.val.bin`. Without, it is that of `documents`, if the numbers agree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import xxhash

from corpus_server.corpus.files import unreadable
from corpus_server.corpus.fingerprints import selection_suffix
from corpus_server.corpus.formats.registry import data_path
from corpus_server.corpus.metadata.table import END_BYTES
from corpus_server.corpus.publish import publishing
from corpus_server.corpus.selection import METADATA_FOLDER, natural_key
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.user_files import open_regular, parse_json, read_regular, reason_of

_DIGEST: Final = "digest.json"
_MADE: Final = {"kind": "corpus-metadata-digest", "version": 1, "digest": "xxh3-128"}


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDigest:
    """What is kept of a file of metadata."""

    name: str
    num_bytes: int
    end: str  # xxh3-128 hex of its end, which is compared where the whole file is not read
    digest: str  # xxh3-128 hex of its bytes


def own_folder(spec: CorpusSpec) -> Path:
    """Return where the metadata of exactly these shards lies, or would lie."""
    path = data_path(spec.path)
    if path.is_dir():
        return path / f"{METADATA_FOLDER}{selection_suffix(spec)}"
    return path.with_name(f"{METADATA_FOLDER}.{path.name}{selection_suffix(spec)}")


def metadata_files(spec: CorpusSpec) -> list[Path]:
    """Return the files of a corpus's metadata in their order, none if there is no metadata."""
    own = own_folder(spec)
    return files_in(own) or files_in(own.with_name(METADATA_FOLDER))


def files_in(folder: Path) -> list[Path]:
    """Return the files of metadata in a folder, in natural order of their names."""
    found = (path for path in folder.glob("*.parquet") if not path.name.startswith("."))
    return sorted(found, key=lambda each: natural_key(each.name))


def load_digests(files: Sequence[Path]) -> list[FileDigest] | None:
    """Return the digests that are kept beside files, None if there are none.

    Raises:
        UnreadableCorpus: they are damaged.
    """
    path = files[0].with_name(_DIGEST)
    try:
        document: dict[str, Any] = parse_json(read_regular(path))
        if {name: document[name] for name in _MADE} != _MADE:
            raise ValueError("another kind of file")
        return [FileDigest(**each) for each in document["files"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"the digest of the metadata cannot be read: {reason_of(error)}"
        raise unreadable(
            path, what, "delete it, or record it again: corpus-server verify --record"
        ) from error


def save_digests(folder: Path, digests: Sequence[FileDigest]) -> None:
    """Keep the digests of the files of a folder beside them."""
    with publishing(folder / _DIGEST) as file:
        document = {**_MADE, "files": [asdict(each) for each in digests]}
        file.write(json.dumps(document, indent=1).encode() + b"\n")


def record_digests(folder: Path) -> str:
    """Compute and keep the digests of a folder's files; return that of all of them."""
    digests = [file_digest(path) for path in files_in(folder)]
    save_digests(folder, digests)
    return joined(digests)


def metadata_digest(files: Sequence[Path]) -> str:
    """Return a digest of the metadata, see `known_digests`."""
    return joined(known_digests(files))


def known_digests(files: Sequence[Path]) -> list[FileDigest]:
    """Return the recorded digests if the files look as they did, else new ones."""
    recorded = load_digests(files)
    if recorded is not None and [_outside(each) for each in recorded] == [*map(_seen, files)]:
        return recorded
    return [file_digest(path) for path in files]


def joined(digests: Sequence[FileDigest]) -> str:
    """Return the digest of several files, whatever they are called."""
    content = "\n".join(each.digest for each in digests)
    return f"xxh3-{xxhash.xxh3_128_hexdigest(content.encode())}"


def find_problem(files: Sequence[Path]) -> str | None:
    """Read all files and compare them with the digests that are kept; return what differs, or None."""
    recorded = load_digests(files)
    if recorded is None:
        return None
    folder, now = files[0].parent.name, [file_digest(path) for path in files]
    if [each.name for each in recorded] != [each.name for each in now]:
        return f"{folder}: {len(recorded)} files of metadata were recorded, here are {len(now)} or other ones"
    wrong = [each.name for each, its in zip(recorded, now, strict=True) if each != its]
    return f"{folder}/{wrong[0]}: its bytes differ from the recorded ones" if wrong else None


def file_digest(path: Path) -> FileDigest:
    """Read a file of metadata."""
    try:
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    except OSError as error:
        raise unreadable(path, f"cannot be read: {error.strerror}", "check the disk") from error
    name, num_bytes, end = _seen(path)
    return FileDigest(name=name, num_bytes=num_bytes, end=end, digest=digest)


def _outside(recorded: FileDigest) -> tuple[str, int, str]:
    return recorded.name, recorded.num_bytes, recorded.end


def _seen(path: Path) -> tuple[str, int, str]:
    """Return name, size and the digest of the end of a file."""
    with open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - END_BYTES))
        return path.name, size, xxhash.xxh3_128_hexdigest(file.readall())
