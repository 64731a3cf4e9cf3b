"""A served file is changed in 22 ways while it is open, and then the server is started again."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from scripts.drills_lib.drill import Found
from scripts.drills_lib.training import QUERY, Web
from tests.corpora import rewrite_in_place, some_tokens
from tests.reference import one_source
from tests.serving import RunningServer

ROWS = (13, 14, 35)
COUNT = "22 ways, 24 requests before and 24 after the restart"
SECONDS = 120
ORACLE = "the file as it was"
RULE = "other tokens never come under the plan's id; a refusal is a 503, or after a restart one line or a 4xx"
NUM_STEPS = 24
NUM_TOKENS = 60_000
REFUSALS = {(503, "corpus-changed"), (503, "read-failed")}
LATER = {*REFUSALS, (409, "fingerprint-mismatch"), (404, "unknown-corpus"), (422, "step-out-of-range")}


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    outcomes = Counter(each for change in CHANGES for each in _drill(change, folder / change.__name__, found))
    found.figure("ways", len(CHANGES))
    for outcome in ("right", "refused", "not started", "right after the restart", "refused after it"):
        found.figure(outcome, outcomes[outcome])


def _drill(change: Callable[[Path], None], folder: Path, found: Found) -> Iterator[str]:
    """Change the file of a running server, then start it again; yield how it answers, both times."""
    folder.mkdir()
    web, what = Web(folder, NUM_TOKENS), change.__name__
    with RunningServer({"web": web.path}, folder) as server:
        plan = {**one_source("web", QUERY["seq_len"], QUERY["batch_size"]), "order": "sequential"}
        plan_id = server.post_plan(plan).json()["id"]
        found.expect(_asked(server, web, plan_id) == {"right"}, f"{what}: not right before it")
        pids = server.worker_pids()
        change(web.path)
        seen = _asked(server, web, plan_id)
        found.expect(seen <= {"right", *REFUSALS}, f"{what}: {seen}")
        found.expect(server.worker_pids() == pids, f"{what}: the worker was lost")
        found.expect("Traceback" not in server.log(), f"{what}: a traceback")
        yield "right" if seen == {"right"} else "refused"
        try:
            server.restart()
        except RuntimeError as error:
            says = [line for line in str(error).splitlines() if line.startswith("error: ")]
            found.expect(len(says) == 1, f"{what}: the start failed with {error}")
            yield "not started"
            return
        seen = _asked(server, web, plan_id)
        found.expect(seen <= {"right", *LATER}, f"{what}, after the restart: {seen}")
        yield "right after the restart" if seen == {"right"} else "refused after it"


def _asked(server: RunningServer, web: Web, plan_id: str) -> set[object]:
    """Return how steps are answered: `right`, `wrong`, or status and type of a refusal."""
    seen: set[object] = set()
    for step in range(NUM_STEPS):
        response = server.get("/v1/batches", plan=plan_id, step=step)
        if response.status == 200:
            seen.add("right" if response.body == web.right(step).tobytes() else "wrong")
        else:
            seen.add((response.status, response.json()["type"]))
    return seen


def other_tokens(path: Path) -> bytes:
    """Return other tokens of the same length."""
    return some_tokens(path.stat().st_size // 2, seed=99).tobytes()


def cut_to_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_in_a_token(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 1)


def cut_to_a_page(path: Path) -> None:
    os.truncate(path, 4096)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def cut_and_extended_again(path: Path) -> None:
    size = path.stat().st_size
    os.truncate(path, size // 2)
    os.truncate(path, size)


def appended_to(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(4096))


def one_token_written(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(200)
        file.write(b"\x01\x02")


def rewritten_with_its_times(path: Path) -> None:
    rewrite_in_place(path, other_tokens(path))


def written_through_a_map(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:2000] = other_tokens(path)[:2000]
        mapped.flush()


def punched(path: Path) -> None:
    size = str(path.stat().st_size // 4096 * 4096)
    subprocess.run(["fallocate", "--punch-hole", "--offset", "0", "--length", size, path], check=True)


def copied_over(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(other_tokens(path))
    shutil.copyfile(new, path)
    new.unlink()


def replaced(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(other_tokens(path))
    new.replace(path)


def replaced_by_the_same(path: Path) -> None:
    new = path.with_suffix(".new")
    shutil.copy2(path, new)
    new.replace(path)


def replaced_by_a_shorter_one(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes()[:8192])
    new.replace(path)


def deleted(path: Path) -> None:
    path.unlink()


def moved_away(path: Path) -> None:
    path.rename(path.with_suffix(".old"))


def replaced_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replaced_by_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replaced_by_a_socket(path: Path) -> None:
    path.unlink()
    with suppress(OSError), socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def replaced_by_a_link_to_a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def its_mode_changed(path: Path) -> None:
    path.chmod(0o600)


def its_time_changed(path: Path) -> None:
    os.utime(path, (1, 1))


CHANGES: tuple[Callable[[Path], None], ...] = (
    *(cut_to_half, cut_in_a_token, cut_to_a_page, cut_to_nothing, cut_and_extended_again, appended_to),
    *(one_token_written, rewritten_with_its_times, written_through_a_map, punched, copied_over),
    *(replaced, replaced_by_the_same, replaced_by_a_shorter_one, deleted, moved_away),
    *(replaced_by_a_folder, replaced_by_a_pipe, replaced_by_a_socket, replaced_by_a_link_to_a_device),
    *(its_mode_changed, its_time_changed),
)
