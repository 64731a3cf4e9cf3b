"""Run the parts of a build: in processes on this machine, or as tasks of a Ray cluster.

Each function is a `RunParts`. An error of a part ends all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from corpus_server.errors import InvalidParameter
from corpus_server.extras import optional_package
from corpus_server.tools import processes
from corpus_server.tools.building.job import BuildOptions, Job, Part
from corpus_server.tools.building.part import PartResult, build_part

# Enough to keep some hundred cores busy; Ray takes milliseconds to look through ten thousand pending tasks.
_IN_FLIGHT: Final = 1000


def in_processes(
    job: Job, parts: Sequence[Part], folder: Path, *, num_processes: int
) -> Iterator[PartResult | int]:
    """Yield the results as parts end in up to `num_processes` processes, and what was read meanwhile.

    Of parts that have not ended only complete files count.
    """
    calls = [(job.options, part, folder) for part in parts]
    for each in processes.counted_in_processes(
        _build_part, calls, num_processes=num_processes, what="the build"
    ):
        yield each.value if isinstance(each, processes.Count) else each


_bytes_each = [1.0]
"""Of this process: how many bytes of input a character or an id took in its last part."""


def _build_part(options: BuildOptions, part: Part, folder: Path) -> PartResult:
    """Build a part, and count its bytes: about, while it is under way, and exactly when it has ended."""
    size = counted = 0

    def note(more: int) -> None:
        nonlocal size, counted
        size += more
        now = min(int(size * _bytes_each[0]), part.num_bytes)
        processes.count(now - counted)
        counted = now

    result = build_part(options, part, folder, note)
    processes.count(part.num_bytes - counted)
    if size:
        _bytes_each[0] = part.num_bytes / size
    return result


def on_ray(job: Job, parts: Sequence[Part], folder: Path) -> Iterator[PartResult]:
    """Yield the results as parts end on a Ray cluster. A task whose machine dies is run again by Ray.

    Uses the process's connection to Ray, if there is one, else connects to the cluster of RAY_ADDRESS or to
    one that runs on this machine, until all parts are done. Never starts a cluster. Its machines need this
    package in the same release, and the sources, the tokenizer and the folder beside OUT under the same
    paths: a shared file system.
    """
    ray = optional_package("ray", extra="ray", purpose="a build on Ray")
    connected = ray.is_initialized()
    if not connected:
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="warning")
        except ConnectionError as error:
            remedy = "set RAY_ADDRESS, and RAY_AUTH_TOKEN if the cluster wants one, or build without Ray"
            raise InvalidParameter(f"expected a Ray cluster: {error}", remedy=remedy) from error
    try:
        task = ray.remote(num_cpus=1)(build_part)
        options = ray.put(job.options)
        waiting = iter(parts)
        pending = [task.remote(options, part, folder) for part in islice(waiting, _IN_FLIGHT)]
        while pending:
            (done,), pending = ray.wait(pending)
            try:
                yield ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            pending += [task.remote(options, part, folder) for part in islice(waiting, 1)]
    finally:
        if not connected:
            ray.shutdown()
