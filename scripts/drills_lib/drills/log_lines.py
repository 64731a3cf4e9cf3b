"""A corpus changes under a server that goes on being asked for it."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

from scripts.drills_lib.drill import Found
from scripts.drills_lib.training import QUERY, Web
from tests.serving import RunningServer, ask

ROWS = (59,)
COUNT = "every request of 6 s, at most 5,000"
SECONDS = 12
ORACLE = "the log"
RULE = "all are refused; at most 4 lines beside those of requests say so, and name the corpus first"


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    web = Web(folder, 1_000_000)
    with RunningServer({"web": web.path}, folder) as server, closing(server.connect()) as connection:
        target = "/v1/batches?" + "&".join(f"{name}={value}" for name, value in QUERY.items())
        found.expect(ask(connection, f"{target}&step=0").status == 200, "the first request was refused")
        with web.path.open("r+b") as file:
            file.write(b"\x01\x02")
        end, refused = time.monotonic() + 6, list[tuple[int, str]]()
        while time.monotonic() < end and len(refused) < 5000:
            response = ask(connection, f"{target}&step={len(refused) % 100}")
            refused.append((response.status, response.json()["type"]))
            time.sleep(0.001)
        lines = [line for line in server.log().splitlines() if "corpus-changed: " in line]
    found.expect(set(refused) == {(503, "corpus-changed")}, f"{set(refused)}")
    found.figure("refused", len(refused), least=500)
    found.figure("lines of the log", len(lines), least=1, most=4)
    found.expect(all("corpus 'web'" in line for line in lines), "a line does not name the corpus")
