"""Fuzz the connections of a running server: `python -m tests.server.http.fuzz --requests 100000 --seed 7`.

Threads run *episodes*. An episode is one connection with a few to a hundred requests, cut into pieces
anywhere, pipelined, read fast or slowly, and ended in many ways. Files change in between. Every response
must be framed, in order, and hold the bytes that plain numpy finds in the files that were written.

A round is one server with its own settings and files. The same seed gives the same episodes; how they
interleave is left to the scheduler. A failure names its seed and shows the requests of its episode.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.raw_http import Ended
from tests.server.http.episodes import MAX_RESPONSE_SECONDS, WAYS_OUT, Episode
from tests.server.responses.world import NUM_CHANGED, NUM_REPLACED, World

NUM_THREADS = 4


class Failure(Exception):
    """A response was wrong; says by which seed to see it again."""


def run_round(seed: int, round_number: int, num_requests: int, *, tls: bool = False) -> Counter[str]:
    """Run one server through `num_requests` checked responses, or over TLS; return what was counted.

    Raises:
        Failure: with the seed, the episode and its requests.
    """
    draw = random.Random(f"{seed} {round_number}")
    with tempfile.TemporaryDirectory() as folder:
        # By turns: a limit that is met all the time, and one that never is.
        limit = (3, 64)[round_number % 2]
        world = World.start(Path(folder), draw, max_concurrent_responses=limit, tls=tls)
        try:
            _run_episodes(world, seed, round_number, num_requests)
            _check_idle(world)
        finally:
            world.server.kill()
        return world.counts


def _run_episodes(world: World, seed: int, round_number: int, num_requests: int) -> None:
    done, episodes = 0, 0
    failures: list[str] = []
    next_change = change_every = num_requests // (NUM_CHANGED + NUM_REPLACED + 1)

    def work() -> None:
        nonlocal done, episodes, next_change
        while done < num_requests and not failures:
            with world.lock:
                number, episodes = episodes, episodes + 1
                changes, next_change = done > next_change, next_change + change_every * (done > next_change)
            draw = random.Random(f"{seed} {round_number} {number}")
            if changes:
                world.change_a_file(draw)
            episode = Episode(world, WAYS_OUT[number % len(WAYS_OUT)], draw)
            try:
                episode.run()
            except (AssertionError, Ended, OSError, KeyError, ValueError) as error:
                first = max(0, episode.num_read - 3)
                shown = [f"  {each.data[:300]!r}" for each in episode.requests[first : episode.num_read + 3]]
                failures.append(
                    f"seed {seed}, round {round_number}, episode {number} ({episode.way_out}), response "
                    f"{episode.num_read} of {len(episode.requests)}: {type(error).__name__}: "
                    f"{str(error)[:1000]}\nrequests {first} and on:\n" + "\n".join(shown)
                )
                return
            with world.lock:
                done += episode.num_read
                world.counts += episode.counts
                world.counts[f"episode: {episode.way_out}"] += 1

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for each in [pool.submit(work) for _ in range(NUM_THREADS)]:
            each.result()
    if failures:
        raise Failure("\n\n".join(failures))


def _check_idle(world: World) -> None:
    """Whoever left has left nothing behind."""
    try:
        world.server.wait_until_idle(MAX_RESPONSE_SECONDS)
    except AssertionError as error:
        raise Failure(f"nobody is connected, but {error}") from error
    if "unexpected=" in (log := world.server.log()):
        raise Failure(log[log.index("unexpected=") :][:5000])


def main() -> None:
    """Run rounds until the number of requests is reached; print what came."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--requests-per-round", type=int, default=10_000)
    parser.add_argument("--tls", action="store_true", help="over TLS")
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    total: Counter[str] = Counter()
    began = time.monotonic()
    for number in range(-(-chosen.requests // chosen.requests_per_round)):
        total += run_round(chosen.seed, number, chosen.requests_per_round, tls=chosen.tls)
        num_done = sum(n for name, n in total.items() if ":" not in name)
        print(f"{num_done} responses, {num_done / (time.monotonic() - began):.0f}/s", flush=True)
    print(", ".join(f"{name} {number}" for name, number in sorted(total.items())))


if __name__ == "__main__":
    main()
