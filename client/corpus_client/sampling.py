"""`get_batch`: the familiar function, one random batch per call."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from corpus_client import errors
from corpus_client.network import control, wire
from corpus_client.network.given import Servers, resolved
from corpus_client.network.options import Network
from corpus_client.network.replicas import Replicas
from corpus_client.plan.document import integer
from corpus_client.plan.hints import check_groups
from corpus_client.staging.ring import find_device
from corpus_client.staging.stager import STORED_DTYPES, widened

RANDOM_STEPS = 2**40
"""Steps of the plan from which random batches are drawn; as many as a server counts."""


class RemoteCorpus:
    """A corpus of a server, as `data` of `get_batch`.

    All batches of one shape are steps of one plan (seed 0, order `random`), spelled in the URL: the server
    keeps nothing for a call.

    Args:
        url: of the server, `http://host:port` or `uds:///path/of.sock`; or a path, as a loader takes it.
        name: of the corpus; `UnknownCorpus` if the server has none of that name. One with loss masks is
            refused, since `get_batch` returns none.
        network: options of the requests, as for `CorpusLoader`.
    """

    def __init__(self, url: Servers, name: str, *, network: Network | None = None) -> None:
        if not isinstance(name, str):  # a mixture, as `corpus=` of a loader takes it
            raise errors.InvalidArgument(
                f"name must be that of one corpus, got {name!r}; a mixture needs a CorpusLoader"
            )
        check_groups({"network": (Network, network)})
        self.name = name
        self._url = resolved(url, network or Network())
        self._pid = os.getpid()
        self._replicas = Replicas(self._url, network)
        with ExitStack() as stack:
            stack.callback(self.close)
            description = self._replicas.ask(control.get(wire.corpus_path(name)))
            self.dtype = str(description["dtype"])
            self._num_tokens = int(description["num_tokens"])
            if description.get("num_masks"):
                raise errors.InvalidArgument(
                    f"get_batch returns no loss mask, and corpus {name!r} has one; take a CorpusLoader, or "
                    "serve the corpus with mask=no"
                )
            if self.dtype not in STORED_DTYPES:
                accepted = list(STORED_DTYPES)
                raise errors.ResponseCorrupt(f"dtype must be one of {accepted}, got {self.dtype!r}")
            stack.pop_all()

    def __repr__(self) -> str:
        return f"RemoteCorpus({self._url!r}, {self.name!r}, {self._num_tokens:,} {self.dtype} tokens)"

    def __reduce__(self) -> tuple[Callable[[], RemoteCorpus], tuple[()]]:
        # A process that it is sent to, such as a spawned worker, gets connections of its own.
        return partial(RemoteCorpus, self._url, self.name, network=self._replicas.network), ()

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._num_tokens

    def draw_into(self, buffer: memoryview, *, batch_size: int, seq_len: int, step: int) -> None:
        """Receive random windows at the start of `buffer`: `(batch_size, seq_len + 1)` as stored, C order.

        step: in `[0, 2**40)`; the same step gives the same windows.
        """
        if os.getpid() != self._pid:
            raise errors.ForkedLoader("a RemoteCorpus was used in a forked process; make it there")
        request = wire.steps_request(
            "/v1/batches",
            (1, batch_size, seq_len + 1),
            self.dtype,
            step=step,
            verify=self._replicas.network.verify,
            corpus=self.name,
            seq_len=seq_len,
            batch_size=batch_size,
            seed=0,
            order="random",
        )
        self._replicas.finish(self._replicas.begin(request), buffer)

    def close(self) -> None:
        """Close its connections; idempotent. In a forked process they are the parent's, and stay open."""
        if os.getpid() == self._pid:
            self._replicas.close()


def get_batch(
    data: npt.NDArray[np.integer] | RemoteCorpus,
    batch_size: int,
    sequence_length: int,
    device: str | torch.device = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows at random starts, each start in `[0, len(data) - sequence_length)` equally likely.

    The tutorial function from which this one comes returned `x` alone; this one returns `(x, y)`, inputs and
    targets, as nanoGPT's does.

    Torch's global generator of the CPU decides: for local data it draws the starts, with the same calls as
    `torch.randint(len(data) - sequence_length, (batch_size,))`; for a remote corpus it draws the step of
    the server's `random` order. A CUDA device is reached through page-locked memory, without blocking.

    Args:
        data: 1-D integer array or memmap, or a `RemoteCorpus`.
        batch_size: rows.
        sequence_length: tokens of a row.

    Returns:
        x, y: each `(batch_size, sequence_length) int64`, contiguous, on the device; y one token further
        than x.

    Raises:
        InvalidArgument: an argument is outside its range, or `data` of another kind or too short.
    """
    batch_size = integer("batch_size", batch_size, 1, 2**20)
    sequence_length = integer("sequence_length", sequence_length, 1, 2**20)
    if isinstance(data, RemoteCorpus):
        dtype = STORED_DTYPES[data.dtype]
    elif isinstance(data, np.ndarray) and data.ndim == 1 and np.issubdtype(data.dtype, np.integer):
        dtype = torch.from_numpy(np.empty(0, data.dtype.newbyteorder("="))).dtype
    else:
        kind = f"{data.ndim}-D {data.dtype}" if isinstance(data, np.ndarray) else type(data).__name__
        raise errors.InvalidArgument(f"data must be a 1-D integer array or a RemoteCorpus, got {kind}")
    num_starts = len(data) - sequence_length
    if num_starts < 1:
        raise errors.InvalidArgument(
            f"data must hold at least sequence_length + 1 = {sequence_length + 1} tokens, got {len(data)}"
        )
    find_device(device)  # refuses what is none; a device without an index stays the current one
    device = torch.device(device)
    # Every call names its device: `torch.set_default_device` would send host memory and draws elsewhere.
    on_host = partial(torch.empty, batch_size, sequence_length + 1, dtype=dtype, device="cpu")
    try:
        stored = on_host(pin_memory=device.type != "cpu")
    except RuntimeError:  # an accelerator without pinned memory
        stored = on_host()
    array = stored.numpy()
    if isinstance(data, RemoteCorpus):
        step = int(torch.randint(RANDOM_STEPS, (), device="cpu"))
        view = memoryview(stored.view(torch.uint8).numpy().data).cast("B")
        data.draw_into(view, batch_size=batch_size, seq_len=sequence_length, step=step)
    else:
        starts = torch.randint(num_starts, (batch_size,), device="cpu").numpy()
        array[:] = np.lib.stride_tricks.sliding_window_view(data, sequence_length + 1)[starts]
    if device.type == "cpu":
        x, y = (torch.from_numpy(widened(part, torch.int64)) for part in (array[:, :-1], array[:, 1:]))
        return x, y
    # The pinned block returns to torch's host allocator, which waits for the copy before reuse.
    tokens = stored.to(device, non_blocking=True)
    return tokens[:, :-1].to(torch.int64).contiguous(), tokens[:, 1:].to(torch.int64).contiguous()
