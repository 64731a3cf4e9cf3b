"""Objects in a store: what there is, and ranges of their bytes.

obstore talks to the stores and repeats what fails on the way. Everything that comes back is compared with
what was asked for: a store, a proxy or a cache between may answer with other bytes than those of the range.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Final
from urllib.parse import urlsplit

from corpus_server.errors import CorpusChanged, CorpusServerError, InvalidParameter, StoreFailed
from corpus_server.extras import optional_package

_WEB: Final = ("https", "http")
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")

# obstore repeats after connection errors and 5xx, with a back-off from 0.1 s on. What still fails then is
# reported, and staging tries the whole shard again later.
_RETRIES: Final = {"max_retries": 6, "retry_timeout": timedelta(seconds=20)}

_TRIES: Final = 3  # of a range that came back wrong
_TRY_AGAIN_SECONDS: Final = 0.2

# Lists, files of keys and requests for tokens have no exception of their own.
_DENIED: Final = re.compile(r"status code: 40[13]\b|credential error|Invalid Access Key|invalid_grant")

_MD5_ETAG: Final = re.compile(r'"?([0-9a-f]{32})"?')


@dataclass(frozen=True, kw_only=True)
class StoreObject:
    """One version of an object.

    Args:
        url: of the object.
        path: in its store.
        etag: what the store calls this version; of a file its inode, size, mtime and ctime.
        modified: when it was written, where the store does not name versions.
    """

    url: str
    path: str
    size_bytes: int
    etag: str | None
    modified: str

    @cached_property
    def key(self) -> str:
        """Name of this version: 40 hex digits; another version, or another object, has another one."""
        version = self.etag or self.modified
        return hashlib.sha256(f"{self.url}\n{self.size_bytes}\n{version}".encode()).hexdigest()[:40]

    @property
    def md5(self) -> str | None:
        """MD5 of its bytes, if the store tells: the ETag of an S3 object that was put in one part."""
        found = _MD5_ETAG.fullmatch(self.etag or "") if self.url.startswith("s3://") else None
        return found[1] if found else None


class Store:
    """A bucket, a container, a web server, or the files of this machine, which may lie on a network's disk.

    Credentials and endpoints are those that obstore finds in the environment.

    Raises:
        MissingPackage: obstore is not installed.
        InvalidParameter: the URL is not one of a store.
    """

    def __init__(self, url: str) -> None:
        self._obstore: Any = optional_package("obstore", extra="stores", purpose=f"A corpus at {url}")
        store: Any = optional_package("obstore.store", extra="stores", purpose=f"A corpus at {url}")
        parts = urlsplit(url)
        has_host = not parts.hostname if parts.scheme == "file" else parts.hostname
        if not has_host or parts.query or parts.fragment or parts.username:
            accepted = "scheme://bucket/path or file:///path, without query, fragment or user"
            raise InvalidParameter.expected("path", accepted, url)
        if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            remedy = "use https: nothing would notice other bytes on the way"
            raise InvalidParameter.expected("path", "https, or http on loopback", url, remedy=remedy)
        self.root = f"{parts.scheme}://{parts.netloc}"
        self.lists = parts.scheme not in _WEB
        self._has_files = parts.scheme == "file"
        # Given options would replace those of the environment, like AWS_ALLOW_HTTP.
        options = {"client_options": {"allow_http": True}} if parts.scheme == "http" else {}
        try:
            self._store = store.from_url(self.root or "file:///", retry_config=_RETRIES, **options)
        except Exception as error:
            raise self._failed(url, error) from error

    def list(self, folder: str, *, recursive: bool) -> list[StoreObject]:
        """Return the objects below a folder, "" for all, in any order."""
        try:
            if recursive:
                found = [each for batch in self._obstore.list(self._store, prefix=folder) for each in batch]
            else:
                found = self._obstore.list_with_delimiter(self._store, prefix=folder)["objects"]
            return [self._object(each) for each in found]
        except Exception as error:
            raise self._failed(f"{self.root}/{folder}", error) from error

    def head(self, path: str) -> StoreObject | None:
        """Return the object at a path; None if there is none."""
        try:
            return self._object(self._obstore.head(self._store, path))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failed(f"{self.root}/{path}", error) from error

    def read(self, what: StoreObject, start: int, stop: int) -> memoryview:
        """Return the bytes [start, stop) of this version of an object, which has them.

        Raises:
            CorpusChanged: the store holds another version now, or none.
            StoreFailed: the store did not deliver.
        """
        for tries in range(_TRIES):
            if tries:
                time.sleep(_TRY_AGAIN_SECONDS * tries)
            try:
                return self._read(what, start, stop)
            except StoreFailed as error:
                failed = error
        raise failed

    def _read(self, what: StoreObject, start: int, stop: int) -> memoryview:
        options: dict[str, Any] = {"range": (start, stop)}
        # By RFC 9110 no weak ETag matches: it is only compared below.
        if what.etag is not None and not (self._has_files or what.etag.startswith("W/")):
            options["if_match"] = what.etag
        try:
            result = self._obstore.get(self._store, what.path, options=options)
            # Compared here too: not every server knows If-Match.
            now = self._object(result.meta)
            if now.key != what.key:
                raise _changed(what, f"{now.size_bytes} bytes, ETag {now.etag}")
            if result.range != (start, stop):
                raise _wrong(what, f"asked for bytes {start} to {stop}, it sent {result.range}")
            content = memoryview(result.bytes())
            if self._has_files and (now := self._object(result.meta)).key != what.key:  # meanwhile
                raise _changed(what, f"{now.size_bytes} bytes, ETag {now.etag}")
        except (FileNotFoundError, self._obstore.exceptions.PreconditionError) as error:
            raise _changed(what, "no such version") from error
        except CorpusServerError:
            raise
        except Exception as error:
            raise self._failed(what.url, error) from error
        if len(content) != stop - start:
            raise _wrong(what, f"asked for {stop - start} bytes from byte {start}, {len(content)} came")
        return content

    def _object(self, meta: Any) -> StoreObject:
        etag, num_bytes = meta["e_tag"], meta["size"]
        if self._has_files:
            # obstore looks at no ctime, which alone shows a rewrite whose modification time was restored, and
            # takes all modification times before 1970 for one.
            status = os.stat(f"/{meta['path']}")  # noqa: PTH116 - the path as it is
            num_bytes = status.st_size
            etag = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_ctime_ns:x}-{num_bytes:x}"
        if etag is not None and not etag.endswith('"'):
            etag = f'"{etag}"'  # Azure's lists leave the quotes out, its other responses do not
        return StoreObject(
            url=f"{self.root}/{meta['path']}",
            path=meta["path"],
            size_bytes=num_bytes,
            etag=etag,
            modified=meta["last_modified"].isoformat(),
        )

    def _failed(self, url: str, error: Exception) -> StoreFailed:
        text = str(error).partition("\n\nDebug source")[0]
        codes = re.findall(r"<Code>(\w+)</Code>", text)
        said = " ".join([text.partition(": <")[0].split("\n")[0], *codes])[:400]
        remedy = "check the network and the store's endpoint"
        denied = (
            self._obstore.exceptions.PermissionDeniedError,
            self._obstore.exceptions.UnauthenticatedError,
        )
        is_denied = isinstance(error, denied) or {"ExpiredToken", "InvalidAccessKeyId"} & set(codes)
        if self._has_files:
            remedy = "check the disk, and that the server's user may read what is there"
        elif is_denied or _DENIED.search(text):
            remedy = "check the credentials in the server's environment: did they expire?"
        elif re.search(r"status code: (429|503)\b", text):
            remedy = "the store asks for fewer requests: try again later"
        elif any(each in text for each in ("Range request not", "non-partial", "Content-Range")):
            remedy = "the store, and each proxy or cache in front of it, must answer ranges"
        elif "must be specified" in text or "Missing" in text:
            remedy = "set the store's environment variables, see docs/stores.md"
        return StoreFailed(f"{url}: {said}", remedy=remedy)


def _changed(what: StoreObject, now: str) -> CorpusChanged:
    return CorpusChanged(
        f"{what.url}: {what.size_bytes} bytes with ETag {what.etag} at opening, now {now}",
        remedy="restart the server to serve it as it is now, or put the old object back",
    )


def _wrong(what: StoreObject, how: str) -> StoreFailed:
    return StoreFailed(f"{what.url}: {how}", remedy="check the store, or a proxy or cache in front of it")
