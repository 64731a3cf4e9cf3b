"""The server of a round of the fuzzer: its files, its plans, and the files' changes."""

from __future__ import annotations

import os
import random
import ssl
import subprocess
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from corpus_server.plan import Plan, Sampler
from tests.corpora import some_tokens, write_npy, write_raw
from tests.serving import RunningServer

NUM_CHANGED, NUM_REPLACED = 10, 3
STEPS = 128
"""Steps of each plan whose right bytes are kept."""

INTACT, CHANGING, CHANGED = range(3)


@dataclass(eq=False)
class Source:
    """A corpus with a plan over it.

    Args:
        paths: its shards.
        plan: document with fingerprints, as the server returned it.
        shards: (corpus, file name) in the order of the plan's shard list.
        tokens: `(STEPS, rows, seq_len + 1)`, the right response to every step.
        located: `(STEPS, rows, 2) int64`, shard and start of every row.
        phase: of the last shard; whoever changes the file sets CHANGING before and CHANGED after.
        change: what was done to it.
    """

    name: str
    paths: Sequence[Path]
    plan_id: str
    plan: dict[str, Any]
    shards: Sequence[tuple[str, str]]
    tokens: np.ndarray
    located: np.ndarray
    sampler: Sampler
    phase: int = INTACT
    change: str = ""

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return int(self.tokens.shape[1])


@dataclass
class World:
    """A server, its files, and what was counted in a round.

    Args:
        large: the source of large responses.
        intact: sources that stay as they are, or are replaced by another file, which a server must not mind.
        changed: sources of whose last shard other bytes are written.
    """

    server: RunningServer
    text: Source
    large: Source
    intact: list[Source]
    replaced: list[Source]
    changed: list[Source]
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def start(
        cls, folder: Path, draw: random.Random, *, max_concurrent_responses: int, tls: bool = False
    ) -> World:
        """Write the files, start a server with settings by chance, and post the plans."""
        shards: dict[str, list[np.ndarray]] = {
            "one": [some_tokens(30_000, seed=1)],
            "three": [some_tokens(count, seed=count) for count in (9_000, 12_000, 7_000)],
            "large": [some_tokens(4_000_000, seed=3)],
            "text": [(some_tokens(20_000, seed=4) % 90 + 32).astype("uint8")],
        }
        for kind, number in (("changed", NUM_CHANGED), ("replaced", NUM_REPLACED)):
            for k in range(number):
                shards[f"{kind}-{k}"] = [some_tokens(5_000, seed=10 + k), some_tokens(5_000, seed=50 + k)]
        paths: dict[str, list[Path]] = {}
        for name, own in shards.items():
            (folder / name).mkdir()
            paths[name] = []
            for k, tokens in enumerate(own):
                if name == "text":
                    paths[name].append(write_npy(folder / name / f"{k}.npy", tokens, dtype="uint8"))
                else:
                    paths[name].append(write_raw(folder / name / f"{k}.bin", tokens))
        settings = {
            "max_concurrent_responses": max_concurrent_responses,
            "gather_threads": draw.choice([1, 4]),
            "read_ahead_bytes": draw.choice([0, 256 * 2**20]),
        }
        server = RunningServer(
            {name: folder / name for name in shards},
            folder,
            uds=folder / "socket" if tls else None,  # for all that is not fuzzed
            arguments=with_certificate(folder) if tls else (),
            config="[server]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()),
        )
        server.start()
        if tls:
            server.port = int(server.log().partition("https://127.0.0.1:")[2].split()[0])
            server.tls = ssl.create_default_context(cafile=str(folder / "certificate.pem"))
            server.tls.check_hostname = False
        sources = {name: cls._source(server, name, own, paths[name], draw) for name, own in shards.items()}
        return cls(
            server,
            sources["text"],
            sources["large"],
            [sources["one"], sources["three"]],
            [source for name, source in sources.items() if name.startswith("replaced")],
            [source for name, source in sources.items() if name.startswith("changed")],
        )

    @staticmethod
    def _source(
        server: RunningServer, name: str, shards: list[np.ndarray], paths: list[Path], draw: random.Random
    ) -> Source:
        seq_len, rows = (4095, 64) if name == "large" else draw.choice([(16, 8), (31, 4), (64, 16)])
        # In file order, the first steps of a source that changes read only the shard that does not.
        order = "shuffle" if name in ("one", "three") else "sequential"
        stage = {"from_step": 0, "global_batch_size": rows, "mixture": {name: 1.0}}
        document: dict[str, Any] = {"seq_len": seq_len, "seed": 5, "order": order, "stages": [stage]}
        if name == "three":
            document["skip_steps"] = [[20, 24], [50, 51]]
        response = server.post_plan(document).json()
        sampler = Sampler(Plan.from_json(response["plan"]), {name: [len(own) for own in shards]})
        located = np.concatenate([sampler.locate(step) for step in range(STEPS)])
        window = np.arange(seq_len + 1)
        tokens = np.stack(
            [np.stack([shards[shard][start + window] for shard, start in step]) for step in located.tolist()]
        )
        listed = [(shard["corpus"], shard["name"]) for shard in response["shards"]]
        return Source(
            name, paths, response["id"], response["plan"], listed, tokens, located.astype("<i8"), sampler
        )

    def change_a_file(self, draw: random.Random) -> None:
        """Change a shard that is intact, in place or by another file in its place."""
        with self.lock:
            left = [each for each in (*self.changed, *self.replaced) if each.phase == INTACT]
            if not left:
                return
            source = draw.choice(left)
            is_replaced = source in self.replaced
            # A file under its old name but with another inode changes nothing for the server.
            source.phase = INTACT if is_replaced else CHANGING
            if is_replaced:
                self.replaced.remove(source)
                self.intact.append(source)
        path = source.paths[-1]
        before = path.stat()
        how = draw.choice(
            ["rename", "delete"] if is_replaced else ["append", "write", "restore", "cut", "touch"]
        )
        if how == "rename":
            write_raw(path.with_name("new"), some_tokens(5_000, seed=99)).replace(path)
        elif how == "delete":
            path.unlink()
        elif how == "append":
            with path.open("ab") as file:
                file.write(b"\1\2")
        elif how == "cut":
            os.truncate(path, before.st_size // 3)
        elif how == "touch":
            os.utime(path)
        else:
            with path.open("r+b") as file:
                file.write(bytes(before.st_size))
            if how == "restore":
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        if not is_replaced:
            source.phase = CHANGED
        with self.lock:
            self.counts[f"file: {how}"] += 1


def with_certificate(folder: Path) -> list[str]:
    """Make a certificate; return the options that serve TLS on a port."""
    key, certificate = str(folder / "key.pem"), str(folder / "certificate.pem")
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    subprocess.run(
        ["openssl", "req", *options, "-keyout", key, "-out", certificate], check=True, capture_output=True
    )
    return ["--host", "127.0.0.1", "--port", "0", "--tls-certificate", certificate, "--tls-key", key]
