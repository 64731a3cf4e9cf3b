"""Each server by itself, and whether several are replicas of one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from corpus_client import __version__, errors
from corpus_client.doctor.findings import Check, Failed
from corpus_client.network.control import BoundPlan, ControlPlane
from corpus_client.network.endpoint import LOOPBACK, Endpoint

RECEIPT_STEPS = (0, 1, 1000)
"""A receipt is of a whole global batch: a few tell other tokens, or another order, from the same."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answered: its URL as given on the command line, its descriptions of corpora by name."""

    url: str
    control: ControlPlane
    version: str
    corpora: Mapping[str, Mapping[str, Any]]


def look_at(control: ControlPlane) -> tuple[Check, Server]:
    """Find out whether a server is there and ready; `Failed` if it cannot be asked for anything."""
    url = control.endpoint.url
    try:
        if control.get("/healthz").get("status") != "alive":
            raise errors.AnswerCorrupt(f"{url}/healthz: not the answer of a corpus-server")
    except errors.TransportError as error:
        raise Failed("server", f"not reachable: {error}", _where(control.endpoint)) from error
    except errors.ServerError as error:
        advice = "check that the URL is that of a corpus-server, and of its route prefix if it has one"
        raise Failed("server", f"{url}: something else answers: {error}", advice) from error
    try:
        control.get("/readyz")
        corpora = {str(corpus["name"]): corpus for corpus in control.get("/v1/corpora")["corpora"]}
        there = str(control.get("/openapi.json").get("info", {}).get("version", "unknown"))
    except errors.CorpusClientError as error:
        advice = "mend what it says on the server, or leave it out; its log tells more"
        raise Failed("server", f"{url}: not ready: {error}", advice) from error
    found = f"{url}: ready, version {there}, corpora: {', '.join(corpora)}"
    measured = {"url": url, "version": there, "corpora": list(corpora)}
    return Check("server", "ok", found, measured=measured), Server(url, control, there, corpora)


def compare_versions(servers: Sequence[Server]) -> Check:
    """Compare the servers' version with the client's, which is released with the same one."""
    there = sorted({server.version for server in servers})
    measured = {"client": __version__, "servers": there}
    if there == [__version__]:
        return Check("versions", "ok", f"{__version__} on both sides", measured=measured)
    advice = "install the same version everywhere; other pairs are not tested together"
    return Check("versions", "warn", f"client {__version__}, servers {', '.join(there)}", advice, measured)


def choose_corpus(servers: Sequence[Server], asked: str | None) -> tuple[Check, str]:
    """Return the corpus asked for, or the only one; `Failed` if not all servers have the same one."""
    served = sorted(set.intersection(*(set(server.corpora) for server in servers)))
    name = asked if asked is not None else served[0] if len(served) == 1 else None
    if name is None:
        advice = "name one with --corpus" if served else "give URLs of replicas, which serve the same corpora"
        raise Failed("corpus", f"all servers have {', '.join(served) or 'none in common'}", advice)
    if missing := [server.url for server in servers if name not in server.corpora]:
        advice = f"name one that is: {', '.join(served) or 'they have none in common'}"
        raise Failed("corpus", f"{name!r} is not served by {', '.join(missing)}", advice)
    fingerprints = {server.url: str(server.corpora[name]["fingerprint"]) for server in servers}
    if len(set(fingerprints.values())) > 1:
        listed = "; ".join(f"{url}: {value[:24]}..." for url, value in fingerprints.items())
        advice = "find the wrong one with `corpus-server verify`, copy it anew and restart there"
        raise Failed("corpus", f"{name!r} has other content on each: {listed}", advice)
    measured = {key: servers[0].corpora[name][key] for key in ("name", "num_tokens", "dtype", "fingerprint")}
    size, fingerprint = f"{measured['num_tokens']:,} {measured['dtype']}", measured["fingerprint"][:24]
    return Check("corpus", "ok", f"{name}: {size} tokens, {fingerprint}...", measured=measured), name


def compare_plans(servers: Sequence[Server], plan: Mapping[str, Any]) -> tuple[Check, BoundPlan]:
    """Compare what servers make of a plan: its id, and the tokens of some steps; `Failed` if they differ."""
    seen = {}
    for server in servers:
        try:
            bound = server.control.post_plan(plan)
            receipts = [server.control.receipt(bound.plan_id, step) for step in RECEIPT_STEPS]
        except errors.CorpusClientError as error:
            advice = "change what it names: --seq-len, --batch-size, --world-size or the corpus"
            raise Failed("plan", f"{server.url}: {error}", advice) from error
        seen[server.url] = (bound.plan_id, *receipts)
    if len(set(seen.values())) > 1:
        listed = "; ".join(f"{url}: plan {ids[0][:12]}..., {ids[1]}" for url, ids in seen.items())
        advice = "run the same version over the same corpora everywhere; a loader would refuse one of them"
        raise Failed("plan", f"replicas do not agree: {listed}", advice)
    agreeing = f"{len(servers)} replicas agree on it" if len(servers) > 1 else "accepted"
    found = f"{bound.plan_id[:12]}...: {agreeing}, receipts of steps {', '.join(map(str, RECEIPT_STEPS))}"
    return Check("plan", "ok", found, measured={"plan_id": bound.plan_id}), bound


def _where(endpoint: Endpoint) -> str:
    if endpoint.socket_path is not None:
        return "is the server running with --uds and this path, and may this user enter its folder?"
    if endpoint.host in LOOPBACK:
        return "is the server running here, on this port?"
    return "is the server running, with --host 0.0.0.0, and does a firewall let this port through?"
