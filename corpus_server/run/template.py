"""The process that workers are copies of: `python -m corpus_server.run.template REQUESTS`, a descriptor.

It imports everything that a worker needs, once, and then forks a worker for each request. So a worker exists
within milliseconds, and shares the memory of all code with the others. A copy of a process lacks the threads
of the original and shares its files, so this process has no thread, no event loop and no open map.

A request is one byte and the descriptors of one worker: see `run/process.py`. The worker becomes a child of
the supervisor: the process between them ends at once, and the kernel gives its children to the next ancestor
that wants them (PR_SET_CHILD_SUBREAPER).
"""

from __future__ import annotations

import gc

gc.disable()  # until all is imported, of which nothing is garbage: 0.05 s of CPU

import asyncio  # noqa: E402
import contextlib  # noqa: E402
import os  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402

import anyio  # noqa: E402

from corpus_server.run import worker  # noqa: E402
from corpus_server.run.process import MAX_DESCRIPTORS, name_process  # noqa: E402


def main() -> None:
    """Fork a worker for each request, until the supervisor closes its end."""
    name_process("corpus-template")
    asyncio.run(_use_anyio())
    gc.enable()
    gc.freeze()  # a collection in a worker would write to every object, and so copy the shared memory
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        while True:
            request, handed, *_ = socket.recv_fds(requests, 1, MAX_DESCRIPTORS)
            if not request:
                return
            if _fork(handed) == 0:
                break
            for each in handed:
                os.close(each)
    worker.main(handed)


async def _use_anyio() -> tuple[object, ...]:
    """Return what Starlette uses of anyio, which imports it only then: 30 ms of a loop."""
    return anyio.CancelScope(), anyio.open_file


def _fork(handed: list[int]) -> int:
    """Fork a worker; return 0 in the worker. Tell the supervisor why, if there is none."""
    try:
        if child := os.fork():
            os.waitpid(child, 0)
            return child
        try:
            is_worker = os.fork() == 0
        except OSError as error:
            _tell(handed, error)
            is_worker = False
        if is_worker:
            return 0
        os._exit(0)
    except OSError as error:
        _tell(handed, error)
        return -1


def _tell(handed: list[int], error: OSError) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(handed[0])) as channel:
        channel.send(str(error).encode())


if __name__ == "__main__":
    main()
