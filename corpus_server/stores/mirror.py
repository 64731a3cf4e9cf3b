"""A corpus in an object store as a folder on this machine: small files whole, others as empty names.

    CACHE/corpora/KEY/00000.bin         empty; opened as a `StagedFile`, as loss masks are
    CACHE/corpora/KEY/00000.idx         the whole file
    CACHE/corpora/KEY/tokenizer.json    the whole file

KEY names the versions of all objects. So everything that selects files, recognises formats or looks for a
file beside another one works on an ordinary folder, and a folder never changes once it is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import unquote

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.files import Closing, OpenFile
from corpus_server.corpus.fingerprints import FINE_BLOCK_BYTES, load_sidecar
from corpus_server.corpus.formats.registry import is_mask, is_side_file, is_unread, mask_names
from corpus_server.corpus.publish import publishing_folder
from corpus_server.corpus.shards import contents
from corpus_server.corpus.snapshots import address_of
from corpus_server.corpus.tokenizers import FILE_NAMES
from corpus_server.corpus.views import open_corpus
from corpus_server.corpus_spec import FILES, CorpusSpec
from corpus_server.errors import InvalidParameter, StoreFailed, UnreadableCorpus
from corpus_server.stores.cache import Cache
from corpus_server.stores.download import RANGE_BYTES, Recorded
from corpus_server.stores.objects import Store, StoreObject
from corpus_server.stores.staged import StagedFile, is_staged

_log = logging.getLogger("corpus_server")

_THREADS: Final = 32  # requests at a time while a corpus is opened; each waits for the network

_LOOK_SECONDS: Final = 0.1  # whether another process has made the folder

# What may lie beside a file of a web server, which lists nothing. {0} is its name, {1} without the extension.
_BESIDE: Final = (
    *("{1}.idx", "{0}.documents", "{0}.hashes.json", "{0}.index", "{0}.metadata", "{1}.csv.gz"),
    *("tokenizer.json", "tokenizer.model"),
)


class Mirror(Closing):
    """The folder of one corpus, until it is closed; the files must be closed before.

    Args:
        spec: of a corpus in a store.
        cache: whose folder holds it.

    Raises:
        StoreFailed: the store did not answer, or names no versions.
        UnreadableCorpus: nothing is there, or the folder cannot be written.
    """

    def __init__(self, spec: CorpusSpec, cache: Cache) -> None:
        url = f"{spec.store}{spec.path}"
        self._store = Store(url)
        if not self._store.lists:  # of the web, as browsers copy it: %20 for a space
            url = unquote(url)
        self._spec, self._url, self._cache = spec, url, cache
        self._files: dict[Path, StagedFile] = {}
        _log.info("%s: opening %s", spec.name, url)  # a slow store looks like a server that hangs
        folder, self._rest, found = self._find(url, spec.include)
        if not found:
            raise UnreadableCorpus(
                f"{url}: expected a token file or a folder of shards, found nothing",
                received=url,
                remedy="check the URL; an empty response may also mean that the credentials may not list",
            )
        for each in found:
            if spec.store == FILES:
                _check_no_link(folder, each.path)
            if each.etag is None and each.modified.startswith("1970-"):
                what = "the server sends neither ETag nor Last-Modified: changes would go unnoticed"
                remedy = "serve it by a server that sends one of them"
                raise StoreFailed(f"{each.url}: {what}", remedy=remedy)
        # Consoles make an empty object for each folder.
        folders = {folder, *(str(parent) for each in found for parent in PurePosixPath(each.path).parents)}
        self._objects = {_name_below(folder, each.path): each for each in found if each.path not in folders}
        try:
            self._root, self._lock = self._folder(url)
        except OSError as error:
            raise UnreadableCorpus(
                f"the small files of {url} cannot be kept in {cache.corpora}: {error.strerror}",
                remedy="make room on its disk, or name another folder with --cache-dir",
            ) from error

    def open(self, path: Path) -> OpenFile:
        """Open a token file or a loss mask of the folder."""
        return self._files.pop(path, None) or self._staged(path)

    def prepare(self, paths: Sequence[Path]) -> None:
        """Read what it takes to open these files, all in parallel."""
        self._files = {path: self._staged(path) for path in paths}
        with ThreadPoolExecutor(_THREADS, "open") as threads:
            for _ in threads.map(StagedFile.read_ends, self._files.values()):
                pass

    def open_corpus(self) -> Corpus:
        """Open the corpus; the caller closes it."""
        address = address_of(self._spec)
        spec = replace(self._spec, path=self._root / self._rest, store=None, address=address)
        with said_of(str(self._root), self._url[: len(self._url) - len(self._rest)].rstrip("/")):
            corpus = open_corpus(spec, files=self)
        _ = corpus.sampled_ids  # kept; later each sample would be a request, one after another
        hashes = load_sidecar(spec)
        content = contents(corpus.shards)
        recorded = (None,) * len(content) if hashes is None else hashes.shards
        for (
            shard
        ) in corpus.shards:  # what was read of it has them, unless it is one of several runs of its file
            if (
                is_staged(shard.file)
                and shard.num_tokens
                and shard.file.has_ends(shard.data_offset, shard.data_bytes)
            ):
                shard.read_edges()
        for shard, its in zip(content, recorded, strict=True):
            if is_staged(shard.file):
                shard.file.forget_ends()
                if its is not None:  # checked when an extent is staged
                    shard.file.recorded.append(Recorded.of(shard, its))
        large = {file for shard in content if is_staged(file := shard.file) and len(file.extents) > 1}
        if any(each.block_bytes > FINE_BLOCK_BYTES for file in large for each in file.recorded):
            _log.warning(
                "corpus %s: its hashes were recorded of blocks of 16 MiB, so a bounded shuffle fetches "
                "extents in which two of its blocks meet for both; run corpus-server verify --record again "
                "where the files lie, and put the new hashes file beside them",
                corpus.name,
            )
        if hashes is None and large:
            _log.warning(
                "corpus %s: %d of its files have more than %d bytes and no recorded hashes, so their "
                "extents are served before the whole was checked; run corpus-server verify --record where "
                "the files lie, and put the hashes file beside them",
                *(corpus.name, len(large), self._cache.extent_bytes),
            )
        return corpus

    def close(self) -> None:
        """Let go of the folder; idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _staged(self, path: Path) -> StagedFile:
        name = path.relative_to(self._root).as_posix()
        return StagedFile(path, self._store, self._objects[name], self._cache)

    def _find(self, url: str, patterns: Sequence[str]) -> tuple[str, str, list[StoreObject]]:
        """Return the folder in the store, the path below it that is served ("" for all), and its objects."""
        path = url.removeprefix(self._store.root).strip("/")
        if not self._store.lists:
            return self._find_on_web(url, path, patterns)
        if patterns:
            return path, "", self._store.list(path, recursive=any("/" in each for each in patterns))
        if found := self._store.list(path, recursive=True):
            return path, "", found
        folder, _, name = path.rpartition("/")
        listed = {each.path: each for each in self._store.list(folder, recursive=False)}
        wanted = beside(path, listed)
        return folder, name, [listed[each] for each in wanted] if any(name in each for each in wanted) else []

    def _find_on_web(
        self, url: str, path: str, patterns: Sequence[str]
    ) -> tuple[str, str, list[StoreObject]]:
        folder, _, name = path.rpartition("/")
        if patterns or not name:
            accepted = "the URL of one file, without a query or a pattern: a web server lists no files"
            said = [url.rstrip("/"), *(each.partition("?")[0] for each in patterns[:1])]  # no signature
            raise InvalidParameter.expected("path", accepted, "/".join(said))
        stem = PurePosixPath(name).stem
        names = [name, *(each.format(name, stem) for each in _BESIDE), *mask_names(name)]
        with ThreadPoolExecutor(_THREADS, "open") as threads:
            heads = list(threads.map(self._store.head, (f"{folder}/{each}".lstrip("/") for each in names)))
        return folder, name, [each for each in heads if each is not None] if heads[0] else []

    def _folder(self, url: str) -> tuple[Path, int]:
        """Return the folder, made if it is missing, and a descriptor that keeps others from removing it."""
        versions = "\n".join(f"{name} {each.key}" for name, each in sorted(self._objects.items()))
        of_url, of_versions = (hashlib.sha256(text.encode()).hexdigest()[:16] for text in (url, versions))
        target = self._cache.corpora / f"{of_url}.{of_versions}"
        while True:
            with self._cache.locked():
                self._remove_others(of_url, target)
                if target.is_dir():
                    return target, _lock(target, fcntl.LOCK_SH)
            try:
                with publishing_folder(target) as folder, ThreadPoolExecutor(_THREADS, "open") as threads:
                    for _ in threads.map(lambda item: self._write(folder, *item), self._objects.items()):
                        pass
                    self._cache.share(folder, *folder.rglob("*"))
            except BlockingIOError:  # another process makes it
                time.sleep(_LOOK_SECONDS)
            except OSError:
                if not target.is_dir():  # no other process was faster
                    raise

    def _write(self, folder: Path, name: str, what: StoreObject) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            if is_side_file(path) and not is_unread(path) and not is_mask(path):
                for start in range(0, what.size_bytes, RANGE_BYTES):
                    file.write(self._store.read(what, start, min(start + RANGE_BYTES, what.size_bytes)))

    def _remove_others(self, of_url: str, target: Path) -> None:
        """Remove folders of older versions that nobody uses, and those that a killed process left."""
        for each in self._cache.corpora.iterdir():
            if each != target and each.name.lstrip(".").startswith(of_url):
                with suppress(OSError):  # someone uses it
                    lock = _lock(each, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(each, ignore_errors=True)
                    os.close(lock)


def beside(path: str, paths: Iterable[str]) -> list[str]:
    """Return the paths of a file and of what may belong to it: its side files, masks, the tokenizer."""
    folder, _, name = path.rpartition("/")
    stem, masks = PurePosixPath(name).stem, mask_names(name)
    return [
        each
        for each in paths
        if (its := PurePosixPath(each)).parent == PurePosixPath(folder)
        and (its.name.startswith(stem) or its.name in masks or any(map(its.match, FILE_NAMES)))
    ]


@contextmanager
def said_of(local: str, url: str) -> Iterator[None]:
    """Report errors about a folder that the user never named as errors about its URL."""
    try:
        yield
    except UnreadableCorpus as error:
        detail, remedy = (text and text.replace(local, url) for text in (error.detail, error.remedy))
        raise UnreadableCorpus(detail or "", received=url, remedy=remedy) from error


def _name_below(folder: str, path: str) -> str:
    """Return the name of an object in its folder; refuse one that would lie outside of the local folder."""
    name = path.removeprefix(folder).lstrip("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise UnreadableCorpus(
            f"the object {path!r} cannot be a file's name", received=path, remedy="rename or exclude it"
        )
    return name


def _check_no_link(folder: str, path: str) -> None:
    """Refuse a file below a folder of this machine that is reached by a symbolic link.

    Raises:
        UnreadableCorpus: nobody sees from outside what such a link brings into a corpus.
    """
    root, found = (os.path.realpath(f"/{each}") for each in (folder, path))
    if Path(found) != Path(root, _name_below(folder, path)):
        raise UnreadableCorpus(
            f"/{path}: is a symbolic link, or lies below one", remedy="copy or hard-link the file"
        )


def _lock(folder: Path, how: int) -> int:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, how)
    except OSError:
        os.close(fd)
        raise
    return fd
