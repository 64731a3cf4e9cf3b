"""Two servers share one corpus and one state folder; each is killed once while both take plans."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

from scripts.drills_lib.drill import Found
from scripts.drills_lib.training import Web, train
from tests.reference import one_source
from tests.serving import RunningServer

ROWS = (12,)
COUNT = "two servers, 4 kills, plans without pause"
SECONDS = 60
ORACLE = "the file, and the ids that both gave"
RULE = "the second says it is one, both know every plan taken, no batch is wrong, the killed leave nothing"


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    web = Web(folder)
    one, other = (RunningServer({"web": web.path}, folder / name) for name in ("one", "other"))
    one.state_dir = other.state_dir = folder / "state"
    taken: list[str] = []
    over = threading.Event()

    def post(server: RunningServer, first: int) -> None:
        seed = first
        while not over.is_set():
            with suppress(OSError, ValueError):  # it is being killed
                response = server.post_plan(one_source("web", 16, 4, seed=seed))
                if response.status == 200:
                    taken.append(response.json()["id"])
                elif response.status != 503:
                    found.failures.append(f"a plan got {response.status} {response.body!r}")
            seed += 1
            time.sleep(0.01)

    def kill() -> None:
        for server in (one, other, one, other):
            time.sleep(2)
            server.kill()
            server.start()

    with one, other:
        found.expect(
            "is shared with 1 other server" in other.log(), "the second one does not say that it is one"
        )
        posting = [
            threading.Thread(target=post, args=(server, number * 10**6), daemon=True)
            for number, server in enumerate((one, other))
        ]
        for each in posting:
            each.start()
        loop = train(web, [one.url, other.url], kill)
        over.set()
        for each in posting:
            each.join()
        for server in (one, other):
            unknown = [each for each in taken if server.get(f"/v1/plans/{each}").status != 200]
            found.expect(not unknown, f"{len(unknown)} of {len(taken)} plans are unknown to {server.url}")
        folders = len(list((folder / "state" / "metrics").iterdir()))
    found.figure("plans taken", len(taken), least=100)
    found.figure("folders of metrics", folders, most=2)
    loop.tell(found, longest=2.0)
