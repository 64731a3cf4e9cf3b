"""The routes of the Hugging Face Hub that `huggingface_hub` asks to list and download a repository."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """A hub on loopback, from entering to leaving.

    Attributes:
        repositories: `datasets/ORG/NAME` or `ORG/NAME` -> its commits by branch or tag, as bytes by name.
        gated: repositories whose files nobody may read without `token`.
        sizes: what the hub says of files instead of the truth: (repository, name) -> bytes.
        licenses: what the cards of repositories say.
        asked: paths of all requests, in order.
        downloads: names of the files that were sent.
        status: of every response, if it is an error.
    """

    repositories: dict[str, dict[str, dict[str, bytes]]]
    gated: set[str] = field(default_factory=set)
    token: str | None = None
    sizes: dict[tuple[str, str], int] = field(default_factory=dict)
    licenses: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    downloads: list[str] = field(default_factory=list)
    status: int = 200

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Return the variables with which the library finds this hub, and its cache in `home`."""
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0"}
        return {"HF_ENDPOINT": url, "HF_HOME": str(home), **quiet, **more}

    def commit(self, repository: str, revision: str = "main") -> str:
        """Return the commit of a branch or tag."""
        return _commit(repository, self.repositories[repository][revision])

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path).strip("/")
                hub.asked.append(path)
                if hub.status != 200:
                    self._refuse(hub.status, "", "the hub is out of order")
                elif path.startswith("api/"):
                    self._describe(path.removeprefix("api/").removeprefix("models/"))
                else:
                    self._file(*path.split("/resolve/", 1))

            def _describe(self, path: str) -> None:
                for what in ("/revision/", "/tree/"):
                    repository, found, revision = path.partition(what)
                    if found and (files := self._find(repository, revision)) is not None:
                        commit = _commit(repository, files)
                        siblings = [{"rfilename": name} for name in files]
                        name = repository.removeprefix("datasets/")
                        about = {"id": name, "sha": commit, "siblings": siblings}
                        if repository in hub.licenses:
                            about["cardData"] = {"license": hub.licenses[repository]}
                        tree = [
                            {
                                "type": "file",
                                "path": name,
                                "size": hub.sizes.get((repository, name), len(content)),
                                "oid": hashlib.sha1(content).hexdigest(),
                            }
                            for name, content in files.items()
                        ]
                        self._send(json.dumps(about if what == "/revision/" else tree).encode())
                    if found:
                        return
                self._refuse(404, "RepoNotFound", "Repository not found")

            def _find(self, repository: str, revision: str) -> dict[str, bytes] | None:
                if (commits := hub.repositories.get(repository)) is None:
                    self._refuse(401, "RepoNotFound", "Repository not found")
                    return None
                named = {_commit(repository, files): files for files in commits.values()} | commits
                if (files := named.get(revision)) is None:
                    self._refuse(404, "RevisionNotFound", "Invalid rev id")
                return files

            def _file(self, repository: str, rest: str = "") -> None:
                revision, _, name = rest.partition("/")
                if (files := self._find(repository, revision)) is None:
                    return
                given = self.headers.get("Authorization")
                if repository in hub.gated and given != f"Bearer {hub.token}":
                    self._refuse(403 if given else 401, "GatedRepo", "Access is restricted")
                    return
                content = files[name]
                if self.command == "GET":
                    hub.downloads.append(name)
                headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
                headers["X-Repo-Commit"] = _commit(repository, files)
                if self.command == "GET" and (wanted := self.headers.get("Range")):
                    start = int(wanted.removeprefix("bytes=").split("-")[0])
                    headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
                    self._send(content[start:], 206, **headers)
                else:
                    self._send(content, **headers)

            def _refuse(self, status: int, code: str, message: str) -> None:
                self._send(b"{}", status, **{"X-Error-Code": code, "X-Error-Message": message})

            def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
                self.send_response(status)
                for header, value in {"Content-Type": "application/json", **headers}.items():
                    self.send_header(header, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        return Handler


def _commit(repository: str, files: dict[str, bytes]) -> str:
    digest = hashlib.sha1(repository.encode())
    for name, content in sorted(files.items()):
        digest.update(name.encode() + content)
    return digest.hexdigest()
