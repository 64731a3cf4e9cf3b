"""A token that may keep one plan posts continuations without end, beside a token with 20 plans."""

from __future__ import annotations

from pathlib import Path

from scripts.drills_lib.drill import Found
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer
from tests.tokens import Tokens, plan, post

ROWS = (31, 52)
COUNT = "60 continuations, 60 plans"
SECONDS = 15
ORACLE = "the list of plans"
RULE = "one plan of that token is kept; the other's 20 are all there"


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    path = write_raw(folder / "web.bin", some_tokens(200_000))
    tokens = Tokens(folder / "tokens.toml")
    tokens.add("one", "read:*", "plans", max_plans=1)
    tokens.add("other", "read:*", "plans", "inspect")
    with RunningServer({"web": path}, folder, arguments=["--tokens", str(tokens.path)]) as server:

        def keep(name: str, document: object) -> tuple[int, str]:
            response = post(server, document, tokens.header(name))
            return response.status, response.json().get("id", "")

        mine = {keep("other", {**plan("web"), "seed": seed})[1] for seed in range(20)}
        statuses = []
        for seed in range(60):
            status, root = keep("one", {**plan("web"), "seed": 1000 + seed})
            link = {"from_step": 10 + seed, "global_batch_size": 8, "mixture": {"web": 1}}
            statuses += [status, keep("one", {"parent": root, "stages": [link]})[0]]
        listed = server.get("/v1/plans?limit=1000", headers=tokens.header("other")).json()["plans"]
        ids = {each["id"] for each in listed}
    found.figure("kept of the other token", len(ids & mine), least=20)
    found.figure("kept of the token with max_plans = 1", len(ids - mine), most=1)
    found.figure("refused (403)", statuses.count(403))
    found.expect(set(statuses) <= {200, 201, 403}, f"statuses {set(statuses)}")
