"""Run parts as tasks of a Ray cluster.

The machines of the cluster need this package in the same release, and the sources, the tokenizer and the
folder beside OUT under the same paths: a shared file system.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from corpus_server.building.job import Job, Part
from corpus_server.building.part import PartResult, build_part
from corpus_server.errors import InvalidParameter
from corpus_server.extras import optional_package

# Enough to keep some hundred cores busy; Ray takes milliseconds to look through ten thousand pending tasks.
_IN_FLIGHT: Final = 1000


def on_ray(job: Job, parts: Sequence[Part], folder: Path) -> Iterator[PartResult]:
    """Yield the results as parts end; a `RunParts`. A task whose machine dies is run again by Ray.

    Uses the process's connection to Ray, if there is one, else connects to the cluster of RAY_ADDRESS or to
    one that runs on this machine, until all parts are done. Never starts a cluster.

    Raises:
        MissingPackage: Ray is not installed.
        InvalidParameter: no cluster is found, or it refuses the connection.
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
