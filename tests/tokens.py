"""A file of access tokens for tests, and the secrets behind its hashes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from corpus_server.admission.access import make_token
from tests.serving import Response, RunningServer


@dataclass
class Tokens:
    """A file of tokens and what they are."""

    path: Path
    tables: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, *scopes: str, expires: datetime | None = None, **limits: int) -> None:
        self.secrets[name], self.tables[name] = make_token(name, scopes, expires, limits)
        self.write()

    def remove(self, name: str) -> None:
        del self.tables[name]
        self.write()

    def write(self) -> None:
        aside = self.path.with_suffix(".new")
        aside.write_text("\n".join(self.tables.values()))
        aside.replace(self.path)

    def header(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secrets[name]}"}


def plan(*names: str) -> dict[str, Any]:
    mixture = dict.fromkeys(names, 1.0)
    return {"seq_len": 16, "stages": [{"global_batch_size": 8, "mixture": mixture}]}


def post(server: RunningServer, document: object, headers: dict[str, str]) -> Response:
    return server.get("/v1/plans", method="POST", body=json.dumps(document).encode(), headers=headers)
