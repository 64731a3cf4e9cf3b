"""The parts of a run, the most valuable first: the clock may end a run before the last ones.

Nothing of a part is imported before it is known that its packages are here.
"""

from __future__ import annotations

import importlib
from typing import Final, NamedTuple, cast

from scripts.gpu_lib.needs import CLIENT, CUDA, SERVER, TESTS
from scripts.gpu_lib.run import EXACT_STEPS, Part


class Listed(NamedTuple):
    """A part: one line of help, and the packages that it imports, with `CUDA` if it needs that."""

    help: str
    needs: tuple[str, ...]


PARTS: Final[dict[str, Listed]] = {
    "tests": Listed(
        help=f"the tests that need a GPU; nine compare {EXACT_STEPS} batches each; a skip is a failure",
        needs=(CUDA, *CLIENT, *SERVER, *TESTS),
    ),
    "copies": Listed(
        help="copies from pageable, torch-pinned and registered memory, and the loader's call for a batch",
        needs=(CUDA, *CLIENT),
    ),
    "training": Listed(
        help="GPT-2 124M, bf16, compiled: tokens/s and stalls by way, with loss.item() and without",
        needs=(CUDA, *CLIENT, *SERVER),
    ),
    "profile": Listed(
        help="torch's profiler over such steps: pinned copies, on a stream of their own, under kernels",
        needs=(CUDA, *CLIENT, *SERVER),
    ),
    "graphs": Listed(
        help="a captured step that reads tensors which loader.next_into fills before each replay",
        needs=(CUDA, *CLIENT, *SERVER),
    ),
    "stalls": Listed(
        help="how long training steps wait for data, by each way of feeding them",
        needs=(CUDA, *CLIENT, *SERVER),
    ),
    "locking": Listed(
        help="how long it takes to page-lock memory and to unlock it, by size",
        needs=(CUDA, *CLIENT),
    ),
    "groups": Listed(
        help="speed of the loader's copies by GROUP_BYTES and by bytes of all slots (prefetch_bytes)",
        needs=(CUDA, *CLIENT),
    ),
    "delivered": Listed(
        help="tokens/s onto the GPU, of a loop that does nothing but ask for the next batch",
        needs=(CUDA, *CLIENT, *SERVER),
    ),
    "server": Listed(
        help="one server with 1 to 8 workers and 1 to 8 clients, beside bare TCP; needs no GPU",
        needs=(*CLIENT, *SERVER),
    ),
}


def load(name: str) -> Part:
    """Return the module of a part."""
    return cast("Part", importlib.import_module(f"scripts.gpu_lib.parts.{name}"))
