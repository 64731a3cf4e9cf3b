"""Repositories of the Hugging Face Hub: their files become files of this machine, by `huggingface_hub`.

A branch or tag is resolved once in a process, to a commit. The files of a commit that are wanted are
downloaded to the library's cache, where they lie as in `corpus/snapshots.py`; from then on they are ordinary
files. Names decide before anything is downloaded: what `serve` would refuse by its name costs nothing.

The list of a commit's files is kept beside them, so that without the network a shard that was never
downloaded is missed.
"""

from __future__ import annotations

import errno
import glob
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from corpus_server.corpus.publish import publishing
from corpus_server.corpus.selection import ShardFile, files_of, in_order
from corpus_server.corpus.snapshots import snapshot_folder
from corpus_server.corpus.tokenizers import BESIDE, FILE_NAMES
from corpus_server.corpus_spec import ALL, HUB, MAX_LICENSE, CorpusSpec
from corpus_server.errors import CorpusServerError, InvalidParameter, StoreFailed, UnreadableCorpus
from corpus_server.extras import optional_package
from corpus_server.stores.mirror import beside, said_of
from corpus_server.user_files import reason_of

Say = Callable[[str], None]
"""Tells a person what is about to happen."""

_LISTING: Final = ".corpus-server.json"  # in the folder of a commit: sizes of the files that it has, by name
_LICENSE: Final = ".corpus-server-license"  # beside it, what the repository's card says
_COMMIT: Final = re.compile("[0-9a-f]{40}")
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One commit of a repository.

    Attributes:
        url: `hf://datasets/ORG/NAME@COMMIT`.
        kind, name, revision: of the repository, as the user named them.
        folder: where its files lie once they are downloaded.
        sizes: bytes of all of its files by name.
        license: as the repository's card says it; None if it says none.
    """

    url: str
    kind: str
    name: str
    revision: str
    commit: str
    folder: Path
    sizes: dict[str, int]
    license: str | None = None

    def fetch(self, names: Sequence[str], say: Say) -> None:
        """Download those of the files that the cache does not hold.

        Raises:
            StoreFailed: they do not fit on the disk, the Hub does not deliver, or may not be asked.
            UnreadableCorpus: the repository is gated.
        """
        missing = [name for name in names if not self._holds(name)]
        left, total = (sum(self.sizes[name] for name in some) for some in (missing, names))
        said = f"{self.url}: {len(names):,} file{'s' * (len(names) > 1)}, {_shown(total)}"
        say(f"{said}, {_shown(left)} to download" if missing else f"{said}, in the cache")
        if not missing:
            return
        self._check_room(left)
        hub = _library(self.url)
        with _asking(self.url, self.name):
            if hub.constants.HF_HUB_OFFLINE:  # some releases of the library would return what there is
                raise hub.errors.OfflineModeIsEnabled
            hub.snapshot_download(
                self.name,
                repo_type=self.kind,
                revision=self.commit,
                # The names as patterns of fnmatch; None stands for all.
                allow_patterns=None if len(missing) == len(self.sizes) else [*map(glob.escape, missing)],
            )
        if lost := [name for name in missing if not self._holds(name)]:
            what = f"{self.url}: {lost[0]} is not in the cache, or not as the Hub lists it"
            raise StoreFailed(what, remedy="check the network, and try again")
        with suppress(OSError):  # a cache for reading: without the network it cannot be used
            _write(self.folder / _LISTING, json.dumps(self.sizes))
            _write(self.folder / _LICENSE, self.license or "")
            if self.revision != self.commit:
                _write(self.folder.parents[1] / "refs" / self.revision, self.commit)

    def _holds(self, name: str) -> bool:
        try:
            return (self.folder / name).stat().st_size == self.sizes[name]
        except OSError:
            return False

    def _check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(next(each for each in self.folder.parents if each.is_dir())).free
        if num_bytes > free:
            cache = self.folder.parents[2]
            what = f"{_shown(num_bytes)} to download, but the disk of {cache} has {_shown(free)} left"
            raise StoreFailed(f"{self.url}: {what}", remedy="make room, or set HF_HOME to another disk")


def fetched(spec: CorpusSpec, say: Say, *, splits: bool = False) -> CorpusSpec:
    """Return the same corpus as files of this machine, after downloading what it lacks; others as they are.

    Args:
        splits: download all splits, one of which need not be chosen.

    Raises:
        UnreadableCorpus: there is no such repository, or its files are no corpus by their names.
        StoreFailed: see `Snapshot.fetch`.
        MissingPackage: huggingface_hub is not installed.
    """
    if spec.tokenizer is not None:
        spec = replace(spec, tokenizer=fetched_tokenizer(spec.tokenizer, say))
    if spec.store is None or not HUB.fullmatch(spec.store):
        return spec
    found = snapshot(spec.store)
    path = spec.path.as_posix().strip("/")
    local = replace(spec, path=found.folder / path, store=None)
    with said_of(str(found.folder), spec.store):
        names = below(found, path)
        if names == [path]:
            names = beside(path, list(found.sizes))
        else:
            files = in_order(ShardFile(name[len(path) :].lstrip("/"), found.folder / name) for name in names)
            chosen = files_of(replace(local, split=spec.split or (ALL if splits else None)), files)
            names = [each.path.relative_to(found.folder).as_posix() for each in chosen]
    found.fetch(names, say)
    return replace(local, license=spec.license or found.license).narrowed()


def fetched_tokenizer(source: str, say: Say) -> str:
    """Return the path of a tokenizer's file, downloaded if `source` is `hf://REPOSITORY[/PATH]`."""
    if (match := HUB.match(source)) is None:
        return source
    try:
        return _fetched_tokenizer(source, match, say)
    except StoreFailed as error:
        remedy = f"{error.remedy}; a tokenizer.json of this machine, or `bytes`, needs no network"
        raise StoreFailed(error.detail, remedy=remedy) from error


def _fetched_tokenizer(source: str, match: re.Match[str], say: Say) -> str:
    found = snapshot(match[0])
    path = source[match.end() :].strip("/")
    names = below(found, path)
    if names != [path]:
        folder = f"{path}/".lstrip("/")
        named = ((name, pattern) for pattern in FILE_NAMES for name in names)
        fitting = (name for name, pattern in named if fnmatchcase(name, glob.escape(folder) + pattern))
        names = [name for name in fitting if "/" not in name[len(folder) :]][:1]
    if not names:
        what = f"{found.url}: holds no tokenizer, which is called {' or '.join(FILE_NAMES)}"
        raise UnreadableCorpus(what, received=source, remedy="name the file: hf://ORG/NAME/PATH")
    folder = f"{names[0].rpartition('/')[0]}/".lstrip("/")
    found.fetch([*names, *(name for each in BESIDE if (name := folder + each) in found.sizes)], say)
    return str(found.folder / names[0])


def below(found: Snapshot, path: str) -> list[str]:
    """Return the names of the file `path` of a commit, or of all files below that folder, "" for all.

    Raises UnreadableCorpus if there is none. Hidden files are left out.
    """
    folder = f"{path}/".lstrip("/")
    names = [path] if path in found.sizes else [name for name in found.sizes if name.startswith(folder)]
    names = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    if not names:
        there = ", ".join(sorted({name.split("/")[0] for name in found.sizes})[:5]) or "nothing"
        raise UnreadableCorpus(f"{found.url}: has no file {path!r}; there are {there}", received=path)
    return names


@cache
def snapshot(url: str) -> Snapshot:
    """Return the commit that a URL means: the newest of a branch, when this process first asks.

    Without the Hub it is the commit that the cache holds under this name.

    Raises:
        UnreadableCorpus: there is no such repository or revision, or it is private or gated.
        StoreFailed: the Hub does not answer, and the cache has no list of the commit's files.
    """
    match = HUB.fullmatch(url)
    if match is None or match[2].startswith(("spaces/", "buckets/")):
        raise InvalidParameter.expected("path", "hf://datasets/ORG/NAME or hf://ORG/NAME", url)
    kind, name, revision = (match[1] or "models").removesuffix("s"), match[2], unquote(match[3] or "main")
    hub = _library(url)
    folder = snapshot_folder(Path(hub.constants.HF_HUB_CACHE).resolve(), f"{kind}s", name, "")
    commit = revision if _COMMIT.fullmatch(revision) else None
    sizes = None if commit is None else _read_listing(folder / commit)
    said: object = None
    if sizes is None:
        try:
            with _asking(url, name):
                api = hub.HfApi()
                about = {"repo_id": name, "repo_type": kind}
                timeout = hub.constants.HF_HUB_ETAG_TIMEOUT
                described = api.repo_info(**about, revision=revision, timeout=timeout)
                commit, said = commit or str(described.sha), getattr(described, "card_data", None)
                if (sizes := _read_listing(folder / commit)) is None:
                    tree = api.list_repo_tree(**about, revision=commit, recursive=True)
                    sizes = {each.path: each.size for each in tree if hasattr(each, "size")}
        except StoreFailed:
            with suppress(OSError):
                commit = commit or (folder.parent / "refs" / revision).read_text().strip()
            if commit is None or (sizes := _read_listing(folder / commit)) is None:
                raise
    assert commit is not None
    license_name = _license_of(said)
    if license_name is None:
        with suppress(OSError):
            license_name = (folder / commit / _LICENSE).read_text()[:MAX_LICENSE] or None
    return Snapshot(
        url=f"{url.partition('@')[0]}@{commit}",
        kind=kind,
        name=name,
        revision=revision,
        commit=commit,
        folder=folder / commit,
        sizes=sizes,
        license=license_name,
    )


def _license_of(card: Any) -> str | None:
    """Return the license that the card of a repository names; of several one after another."""
    named = None if card is None else card.get("license")
    named = ", ".join(map(str, named)) if isinstance(named, list) else named
    if not isinstance(named, str) or not named.isprintable():
        return None
    return named[:MAX_LICENSE] or None


def _read_listing(folder: Path) -> dict[str, int] | None:
    try:
        return {str(name): int(size) for name, size in json.loads((folder / _LISTING).read_bytes()).items()}
    except (OSError, ValueError, AttributeError):
        return None


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with publishing(path) as file:
        file.write(text.encode())


def _library(url: str) -> Any:
    for part in ("constants", "errors"):
        optional_package(f"huggingface_hub.{part}", extra="hub", purpose=url)
    return optional_package("huggingface_hub", extra="hub", purpose=url)


@contextmanager
def _asking(url: str, name: str) -> Iterator[None]:
    """Report in one line what the library raises, most often with the reason among the causes."""
    hub = _library(url)
    try:
        yield
    except Exception as error:
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
            chain.append(cause)
        raise _failure(url, name, hub, chain) from error


def _failure(url: str, name: str, hub: Any, chain: Sequence[BaseException]) -> CorpusServerError:
    def caused_by(kind: str) -> bool:
        return any(isinstance(each, getattr(hub.errors, kind)) for each in chain)

    cache, endpoint = hub.constants.HF_HUB_CACHE, hub.constants.ENDPOINT
    page = f"{endpoint}/{url.partition('@')[0].removeprefix('hf://')}"
    if caused_by("GatedRepoError"):
        remedy = f"ask for access on {page}, then set HF_TOKEN, or run `hf auth login`"
        return UnreadableCorpus(f"{url}: is gated: its owners decide who may read it", remedy=remedy)
    if caused_by("RepositoryNotFoundError"):
        kind = "data set" if "/datasets/" in page else "model"
        remedy = (
            "check the name (a data set is hf://datasets/ORG/NAME), or the path if a file was meant; "
            "a private one needs HF_TOKEN"
        )
        what = f"{url}: {endpoint} has no {kind} {name!r}, or it is private"
        return UnreadableCorpus(what, received=url, remedy=remedy)
    if caused_by("RevisionNotFoundError"):
        remedy = f"choose one on {page}/tree/main"
        return UnreadableCorpus(f"{url}: has no such branch, tag or commit", received=url, remedy=remedy)
    if caused_by("OfflineModeIsEnabled"):
        what = f"{url}: HF_HUB_OFFLINE is set, and the cache {cache} does not hold all of it"
        remedy = "run the same command once with the network, or set HF_HOME to a cache that has it"
        return StoreFailed(what, remedy=remedy)
    if any(getattr(each, "errno", None) in _FULL or "os error 28" in str(each) for each in chain):
        remedy = "make room, or set HF_HOME to another disk; the same command continues"
        return StoreFailed(f"{url}: the disk of {cache} is full", remedy=remedy)
    said = " ".join(reason_of(chain[-1]).split()) or type(chain[-1]).__name__
    remedy = "check the network and HF_ENDPOINT; with HF_HUB_OFFLINE=1 the cache alone is used"
    return StoreFailed(f"{url}: {endpoint} did not deliver: {said}", remedy=remedy)


def _shown(num_bytes: int) -> str:
    size, unit = next(
        ((size, unit) for size, unit in ((1e9, "GB"), (1e6, "MB")) if num_bytes >= size), (1e3, "kB")
    )
    return f"{num_bytes / size:,.1f} {unit}"
