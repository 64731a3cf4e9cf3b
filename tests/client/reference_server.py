"""A small server that speaks the wire contract, and breaks it on request: the client tests' faults."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import numpy as np
import xxhash

from tests.client.reference_plan import (
    ORDERS,
    ReferenceCorpus,
    first_step_of,
    plan_step_of,
    receipt_of,
    rows_of_step,
    sources_of,
    stage_of,
    tokens_of_step,
)


@dataclass(frozen=True)
class Fault:
    """What to do to one array response.

    kind: cut | reset | checksum | shape | length | flip | busy | error | bad-request | slow | hole |
        other-corpus | unknown-plan | header-plan |
        answer-late (once the next request has come on the same connection) |
        pause (in the middle of the body) | hang-up (before the first byte) |
        other-step (the whole, valid answer of the step behind it)
    at: where (bytes into the body) or for how long (seconds), by kind.
    """

    kind: str
    at: float = 0


class Problem(Exception):
    def __init__(self, status: int, slug: str, detail: str, **more: object) -> None:
        super().__init__(detail)
        self.status = status
        self.body = {"type": slug, "title": slug, "status": status, "detail": detail, **more}


@dataclass
class ReferenceServer:
    """One server process's worth of behaviour, on a thread.

    Args:
        next_fault: called for every array response; None: answer rightly.
        receipt_seconds, receipt_salt: how long a receipt takes, and what makes it a wrong one.
        moved: whether the indices of a step are wrong.
        port: 0 for a free one; a fixed one to come back on.
        max_idle_seconds: close a connection that asks for nothing for so long after a response.
        token: what a request must carry; None: nothing.
        host: loopback address to listen on.
    """

    corpora: list[ReferenceCorpus]
    next_fault: Callable[[], Fault | None] = lambda: None
    port: int = 0
    plan_salt: str = ""
    tls: ssl.SSLContext | None = None
    max_idle_seconds: float | None = None
    token: str | None = None
    host: str = "127.0.0.1"
    plans: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_arrays: int = 0
    num_posts: int = 0
    num_receipts: int = 0
    receipt_seconds: float = 0
    receipt_salt: Callable[[dict[str, Any], int], bytes] = lambda plan, step: b""
    moved: Callable[[dict[str, Any], int], bool] = lambda plan, step: False
    paths: list[str] = field(default_factory=list)
    array_headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: list[int] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def __enter__(self) -> ReferenceServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.host}:{self.port}"

    def start(self) -> None:
        self._open: set[socket.socket] = set()
        self._release = threading.Event()
        self._http = _Server((self.host, self.port), _Handler)
        self._http.reference = self
        if self.tls is not None:
            self._http.socket = self.tls.wrap_socket(self._http.socket, server_side=True)
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop as `kill -9` would: connections break."""
        self._release.set()
        self._http.shutdown()
        self._thread.join()
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._http.server_close()

    def corpus(self, name: str) -> ReferenceCorpus:
        for corpus in self.corpora:
            if corpus.name == name:
                return corpus
        raise Problem(404, "unknown-corpus", f"no corpus is named {name!r}")

    def describe_plan(self, plan: dict[str, Any]) -> dict[str, Any]:
        if "parent" in plan:
            return self.describe_links(plan)
        if plan["order"] not in ORDERS:
            raise Problem(
                422, "invalid-plan", f"order must be one of {', '.join(ORDERS)}, got {plan['order']!r}"
            )
        stride = 1 if plan["order"] == "random" else plan["seq_len"]
        plan = {"version": 1, "stride": stride, "skip_steps": [], **plan}
        names = sources_of(plan)
        corpora = {name: self.corpus(name) for name in names}
        given = plan.get("fingerprints", {})
        for name, corpus in corpora.items():
            theirs = given.get(name, corpus.fingerprint)
            if theirs != corpus.fingerprint:
                raise Problem(409, "fingerprint-mismatch", f"{name}: {corpus.fingerprint} is not {theirs}")
        plan["fingerprints"] = {name: corpus.fingerprint for name, corpus in corpora.items()}
        canonical = json.dumps(plan, sort_keys=True, separators=(",", ":"))
        plan_id = hashlib.sha256((self.plan_salt + canonical).encode()).hexdigest()
        self.plans[plan_id] = plan
        return {
            "id": plan_id,
            "plan": plan,
            "sources": {
                name: {"num_windows": 1, "fingerprint": corpus.fingerprint, "eot": corpus.eot}
                for name, corpus in corpora.items()
            },
            "stages": [
                {
                    "from_step": stage["from_step"],
                    "first_step": first_step_of(plan, number),
                    "global_batch_size": stage["global_batch_size"],
                    "seq_len": stage.get("seq_len", plan["seq_len"]),
                }
                for number, stage in enumerate(plan["stages"])
            ],
            "num_steps": None,
            "dtype": self.dtype_of(plan).name,
            "shards": [
                {"corpus": name, **{k: v for k, v in shard.items() if k != "format"}}
                for name, corpus in corpora.items()
                for shard in corpus.shards()
            ],
        }

    def describe_links(self, posted: dict[str, Any]) -> dict[str, Any]:
        """Keep a whole plan for each stage that is added; say only what comes with them."""
        first, before = self.known(posted["parent"]), posted["parent"]
        plan = first
        for stage in posted["stages"]:
            if plan["stages"][-1]["from_step"] >= stage["from_step"]:
                raise Problem(422, "invalid-plan", "stages[0].from_step must be above that of the last stage")
            plan = {**plan, "stages": [*plan["stages"], _canonical(stage, plan["seq_len"])]}
            plan["fingerprints"] = {name: self.corpus(name).fingerprint for name in sources_of(plan)}
            link = {"parent": before, "stages": plan["stages"][-1:]}
            canonical = json.dumps(link, sort_keys=True, separators=(",", ":"))
            before = hashlib.sha256((self.plan_salt + canonical).encode()).hexdigest()
            self.plans[before] = plan
        whole = self.describe_plan({**plan, "fingerprints": {}})
        added = whole["stages"][len(first["stages"]) :]
        for described, stage in zip(added, plan["stages"][len(first["stages"]) :], strict=True):
            described["weights_65536"] = {name: round(w * 65536) for name, w in stage["mixture"].items()}
        known = {*sources_of(first)}
        link["fingerprints"] = {name: its for name, its in plan["fingerprints"].items() if name not in known}
        shards = [shard for shard in whole["shards"] if shard["corpus"] not in known]
        return whole | {
            "id": before,
            "plan": link,
            "num_stages": len(plan["stages"]),
            "stages": added,
            "shards": shards,
        }

    def dtype_of(self, plan: dict[str, Any]) -> np.dtype:
        return np.result_type(*(self.corpus(name).dtype for name in sources_of(plan)))

    def known(self, plan_id: str) -> dict[str, Any]:
        if plan_id not in self.plans:
            raise Problem(404, "unknown-plan", "post the plan and go on")
        return self.plans[plan_id]


def _canonical(stage: dict[str, Any], seq_len: int) -> dict[str, Any]:
    total = sum(stage["mixture"].values())
    units = {name: round(stage["mixture"][name] * 65536 / total) for name in sorted(stage["mixture"])}
    kept = {k: v for k, v in stage.items() if not (k == "seq_len" and v == seq_len)}
    return {**kept, "mixture": {name: each / 65536 for name, each in units.items()}}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    reference: ReferenceServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Broken connections are what the tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    @property
    def ref(self) -> ReferenceServer:
        return self.server.reference

    def log_message(self, *_: object) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.ref._open.add(self.connection)

    def handle_one_request(self) -> None:
        super().handle_one_request()
        if not self.close_connection:  # from now on: a new connection has all time, as with real servers
            self.connection.settimeout(self.ref.max_idle_seconds)

    def finish(self) -> None:
        self.ref._open.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        self._response(self._get)

    def do_HEAD(self) -> None:
        """Answer a loader that says that it ends."""
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        self._response(self._post)

    def _response(self, route: Callable[[], None]) -> None:
        self.ref.headers.append(dict(self.headers.items()))
        try:
            if self.ref.token and self.headers["Authorization"] != f"Bearer {self.ref.token}":
                self.close_connection = True  # a body was not read
                raise Problem(401, "unauthorized", "no valid token")
            route()
        except Problem as problem:
            self._json(problem.body, problem.status, "application/problem+json")

    def _json(self, value: object, status: int = 200, kind: str = "application/json", **headers: str) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(body)

    def _post(self) -> None:
        self.ref.num_posts += 1
        plan = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._json(self.ref.describe_plan(plan))

    def _get(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        match parts.path.strip("/").split("/"):
            case ["v1", "corpora"]:
                self._json({"corpora": [corpus.describe() for corpus in self.ref.corpora]})
            case ["v1", "corpora", name]:
                self._json(self.ref.corpus(unquote(name)).describe())
            case ["v1", "corpora", name, "tokens"]:
                corpus = self.ref.corpus(unquote(name))
                start, count = int(query["start"]), int(query["count"])
                self._array(np.concatenate(corpus.shard_arrays)[start : start + count], None, query)
            case ["v1", "plans", plan_id, "usage"]:
                plan, step = self.ref.known(plan_id), int(query["step"])
                self._json({"plan": plan_id, "step": step, "plan_step": plan_step_of(plan, step)})
            case ["v1", "plans", plan_id, "receipt"]:
                self._receipt(plan_id, int(query["step"]))
            case ["v1", ("batches" | "indices") as what]:
                self._steps(what, query)
            case _:
                raise Problem(404, "not-found", f"no route {parts.path}")

    def _receipt(self, plan_id: str, step: int) -> None:
        plan = self.ref.known(plan_id)
        self.ref.num_receipts += 1
        self.ref._release.wait(self.ref.receipt_seconds)
        tokens = tokens_of_step(self.ref.corpora, plan, step)
        digest = receipt_of(tokens, self.ref.receipt_salt(plan, step))
        self._json(
            {
                "plan": plan_id,
                "step": step,
                "plan_step": plan_step_of(plan, step),
                "global_batch_size": len(tokens),
                "digest": digest,
            }
        )

    def _steps(self, what: str, query: dict[str, str]) -> None:
        fault = self.ref.next_fault()
        if fault is not None and fault.kind == "unknown-plan":
            self.ref.plans.clear()
        if "plan" in query:
            self.ref.known(query["plan"])
            plan_id = query["plan"]
        else:
            inline = {name: int(query[name]) for name in ("seq_len", "seed")}
            stage = {
                "from_step": 0,
                "global_batch_size": int(query["batch_size"]),
                "mixture": {query["corpus"]: 1.0},
            }
            plan_id = self.ref.describe_plan({**inline, "order": query["order"], "stages": [stage]})["id"]
        plan = self.ref.plans[plan_id]
        rank, world_size = int(query.get("rank", 0)), int(query.get("world_size", 1))
        first, count = int(query["step"]), int(query.get("count", 1))
        if fault is not None and fault.kind == "other-step":
            first += 1
        self.ref.counts.append(count)
        with self.ref.lock:
            self.ref.paths.append(self.path)
            self.ref.array_headers.append(dict(self.headers.items()))
        numbers = {stage_of(plan, plan_step_of(plan, step))[0] for step in (first, first + count - 1)}
        sizes = {plan["stages"][n]["global_batch_size"] for n in range(min(numbers), max(numbers) + 1)}
        if len(sizes) > 1:
            raise Problem(422, "invalid-parameter", "the steps have different batch sizes")
        rows = sizes.pop() // world_size
        part = slice(rank * rows, (rank + 1) * rows)
        of_step = tokens_of_step if what == "batches" else rows_of_step
        steps = [of_step(self.ref.corpora, plan, step)[part] for step in range(first, first + count)]
        array = np.asarray(steps, dtype=self.ref.dtype_of(plan) if what == "batches" else np.int64)
        if what == "indices" and self.ref.moved(plan, first):
            array[0, 0, 1] += 1
        form = "raw+tail" if query.get("checksum") == "tail" else "raw"
        tag = f'"{plan_id}.{what}.{first}.{count}.{rank}.{world_size}.{form}"'
        self._array(array, plan_id, query, fault, tag)

    def _array(
        self,
        array: np.ndarray,
        plan_id: str | None,
        query: dict[str, str],
        fault: Fault | None = None,
        tag: str | None = None,
    ) -> None:
        self.ref.num_arrays += 1
        fault = fault or Fault("")
        if fault.kind == "busy":
            busy = {"type": "overloaded", "detail": "too much"}
            self._json(busy, 503, "application/problem+json", Retry_After=str(int(fault.at)))
            return
        self._fail_before_the_response(fault)
        body = bytearray(np.ascontiguousarray(array).tobytes())
        verified = query.get("checksum") == "tail"
        tail = xxhash.xxh3_64_digest(bytes(body)) if verified else b""
        headers = {
            "Content-Length": str(len(body) + len(tail)),
            "Corpus-Shape": ",".join(map(str, array.shape)),
            "Corpus-Dtype": array.dtype.name,
            "Corpus-Plan": plan_id,
            "ETag": tag,
            "Corpus-Checksum": "xxh3-64=tail" if verified else None,
        }
        wrong = {
            "shape": {"Corpus-Shape": "1,1,1"},
            "length": {"Content-Length": str(len(body) + len(tail) + 2)},
            "header-plan": {"Corpus-Plan": 64 * "0"},
        }
        headers |= wrong.get(fault.kind, {})
        if fault.kind == "checksum":
            tail = bytes(8)
        elif fault.kind == "flip":
            body[int(fault.at) % len(body)] ^= 0x10
        self.send_response(200)
        for name, text in headers.items():
            if text is not None:
                self.send_header(name, text)
        self.end_headers()
        self._send_with_fault(body + tail, len(body), fault)

    def _fail_before_the_response(self, fault: Fault) -> None:
        if fault.kind == "error":
            raise Problem(500, "internal-error", "it broke")
        if fault.kind == "other-corpus":
            raise Problem(409, "fingerprint-mismatch", "corpus 'web' has other content")
        if fault.kind == "bad-request":
            raise Problem(422, "response-too-large", "too large", remedy="ask for less")
        if fault.kind == "slow":
            time.sleep(fault.at)
        elif fault.kind == "answer-late":
            self.rfile.peek(1)  # type: ignore[attr-defined]
        elif fault.kind == "hang-up":
            raise ConnectionAbortedError
        elif fault.kind == "hole":
            self.ref._release.wait(60)
            raise ConnectionAbortedError

    def _send_with_fault(self, body: bytearray, array_bytes: int, fault: Fault) -> None:
        if fault.kind in ("cut", "reset"):
            self.wfile.write(body[: int(fault.at) % array_bytes])
            self.wfile.flush()
            if fault.kind == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            raise ConnectionAbortedError
        if fault.kind == "pause":
            self.wfile.write(body[:100])
            self.ref._release.wait(fault.at)
            del body[:100]
        self.wfile.write(body)
