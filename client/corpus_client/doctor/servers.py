"""Each server by itself, and whether several are replicas of one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from corpus_client import errors
from corpus_client.control import BoundPlan, ControlPlane
from corpus_client.doctor.findings import Check
from corpus_client.endpoint import LOOPBACK, Endpoint

RECEIPT_STEPS = (0, 1, 1000)
"""A receipt is of a whole global batch: a few tell other tokens, or another order, from the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A server that answered.

    Args:
        corpora: descriptions by name.
    """

    control: ControlPlane
    version: str
    corpora: Mapping[str, Mapping[str, Any]]

    @property
    def url(self) -> str:
        """As given on the command line."""
        return self.control.endpoint.url


def look_at(control: ControlPlane) -> tuple[Check, Server | None]:
    """Is it there, and is it ready; None: it cannot be asked for anything."""
    endpoint = control.endpoint
    try:
        control.check_alive()
    except errors.TransportError as error:
        return Check(
            name="server", status="fail", found=f"not reachable: {error}", advice=_where(endpoint)
        ), None
    except errors.ServerError as error:
        advice = "check that the URL is that of a corpus-server, and of its route prefix if it has one"
        return Check(
            name="server",
            status="fail",
            found=f"{endpoint.url}: something else answers: {error}",
            advice=advice,
        ), None
    try:
        control.check_ready()
        server = Server(
            control=control,
            version=control.version(),
            corpora={str(corpus["name"]): corpus for corpus in control.corpora()},
        )
    except errors.CorpusClientError as error:
        advice = "mend what it says on the server, or leave it out; its log tells more"
        return Check(
            name="server", status="fail", found=f"{endpoint.url}: not ready: {error}", advice=advice
        ), None
    found = f"{endpoint.url}: ready, version {server.version}, corpora: {', '.join(server.corpora)}"
    measured = {"url": endpoint.url, "version": server.version, "corpora": list(server.corpora)}
    return Check(name="server", status="ok", found=found, measured=measured), server


def compare_versions(servers: Sequence[Server]) -> Check:
    """Servers of one version, which the client was released with."""
    here = client_version()
    there = sorted({server.version for server in servers})
    measured = {"client": here, "servers": there}
    if there == [here]:
        return Check(name="versions", status="ok", found=f"{here} on both sides", measured=measured)
    return Check(
        name="versions",
        status="warn",
        found=f"client {here}, servers {', '.join(there)}",
        advice="install the same version everywhere; other pairs are not tested together",
        measured=measured,
    )


def client_version() -> str:
    """Of the installed distribution."""
    try:
        return version("corpus-client")
    except PackageNotFoundError:
        return "unknown"


def choose_corpus(servers: Sequence[Server], asked: str | None) -> tuple[Check, str | None]:
    """The corpus asked for, or the only one; the same content on all servers."""
    served = sorted(set.intersection(*(set(server.corpora) for server in servers)))
    name = asked if asked is not None else served[0] if len(served) == 1 else None
    if name is None:
        return Check(
            name="corpus",
            status="fail",
            found=f"all servers have {', '.join(served) or 'none in common'}",
            advice="name one with --corpus"
            if served
            else "give URLs of replicas, which serve the same corpora",
        ), None
    if missing := [server.url for server in servers if name not in server.corpora]:
        return Check(
            name="corpus",
            status="fail",
            found=f"{name!r} is not served by {', '.join(missing)}",
            advice=f"name one that is: {', '.join(served) or 'they have none in common'}",
        ), None
    fingerprints = {server.url: str(server.corpora[name]["fingerprint"]) for server in servers}
    if len(set(fingerprints.values())) > 1:
        listed = "; ".join(f"{url}: {value[:24]}..." for url, value in fingerprints.items())
        return Check(
            name="corpus",
            status="fail",
            found=f"{name!r} has other content on each: {listed}",
            advice="find the wrong one with `corpus-server verify`, copy it anew and restart there",
        ), None
    described = servers[0].corpora[name]
    found = (
        f"{name}: {described['num_tokens']:,} {described['dtype']} tokens, {described['fingerprint'][:24]}..."
    )
    measured = {key: described[key] for key in ("name", "num_tokens", "dtype", "fingerprint")}
    return Check(name="corpus", status="ok", found=found, measured=measured), name


def compare_plans(servers: Sequence[Server], plan: Mapping[str, Any]) -> tuple[Check, BoundPlan | None]:
    """The same plan, made of the same document, and the same tokens by it."""
    bound, seen = None, {}
    for server in servers:
        try:
            bound = server.control.post_plan(plan)
            receipts = [server.control.receipt(bound.plan_id, step) for step in RECEIPT_STEPS]
        except errors.CorpusClientError as error:
            return Check(
                name="plan",
                status="fail",
                found=f"{server.url}: {error}",
                advice="change what it names: --seq-len, --batch-size, --world-size or the corpus",
            ), None
        seen[server.url] = (bound.plan_id, *receipts)
    if len(set(seen.values())) > 1:
        listed = "; ".join(f"{url}: plan {ids[0][:12]}..., {ids[1]}" for url, ids in seen.items())
        return Check(
            name="plan",
            status="fail",
            found=f"replicas do not agree: {listed}",
            advice="run the same version over the same corpora everywhere; a loader would refuse one of them",
        ), None
    assert bound is not None
    agreeing = f"{len(servers)} replicas agree on it" if len(servers) > 1 else "accepted"
    steps = ", ".join(map(str, RECEIPT_STEPS))
    return Check(
        name="plan",
        status="ok",
        found=f"{bound.plan_id[:12]}...: {agreeing}, receipts of steps {steps}",
        measured={"plan_id": bound.plan_id},
    ), bound


def _where(endpoint: Endpoint) -> str:
    if endpoint.socket_path is not None:
        return "is the server running with --uds and this path, and may this user enter its folder?"
    if endpoint.host in LOOPBACK:
        return "is the server running here, on this port?"
    return "is the server running, with --host 0.0.0.0, and does a firewall let this port through?"
