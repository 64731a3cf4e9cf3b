"""`get_batch`: the familiar function, one random batch per call."""

from __future__ import annotations

import os
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import torch

from corpus_client import errors
from corpus_client.network import wire
from corpus_client.network.options import Network
from corpus_client.network.replicas import Replicas
from corpus_client.plan.document import integer
from corpus_client.staging.device import STORED_DTYPES, widened

RANDOM_STEPS = 2**40
"""Steps of the plan from which random batches are drawn; as many as a server counts."""


class RemoteCorpus:
    """A corpus of a server, as `data` of `get_batch`.

    All batches of one shape are steps of one plan (seed 0, order `random`), spelled in the URL: the server
    keeps nothing for a call.

    Args:
        url: base URL of the server, `http://host:port` or `uds:///path/of.sock`.
        name: of the corpus; `UnknownCorpus` if the server has none of that name.
        network: options of the requests, as for `CorpusLoader`.
    """

    def __init__(self, url: str, name: str, *, network: Network | None = None) -> None:
        self.name = name
        self._pid = os.getpid()
        self._replicas = Replicas([url], network)
        description = self._replicas.ask(lambda control: control.get(wire.corpus_path(name)))
        self.dtype = str(description["dtype"])
        self._num_tokens = int(description["num_tokens"])
        if self.dtype not in STORED_DTYPES:
            raise errors.AnswerCorrupt(f"dtype must be one of {list(STORED_DTYPES)}, got {self.dtype!r}")

    @classmethod
    def from_url(cls, url: str) -> RemoteCorpus:
        """Return the corpus at `http://host:port/name`, or at `uds:///path/of.sock/name`."""
        base, _, name = url.rstrip("/").rpartition("/")
        if base.endswith(("/", ":")) or not name:
            raise errors.InvalidArgument(
                f"a remote corpus must be http://host:port/name or uds:///path/of.sock/name, got {url!r}"
            )
        return cls(base, unquote(name))

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
        """Close its connections; idempotent."""
        self._replicas.close()


Data = npt.NDArray[np.integer] | RemoteCorpus | str


def get_batch(
    data: Data, batch_size: int, sequence_length: int, device: str | torch.device = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows at random starts, each start in `[0, len(data) - sequence_length)` equally likely.

    The tutorial function from which this one comes returned `x` alone; this one returns `(x, y)`, inputs and
    targets, as nanoGPT's does.

    Torch's global generator decides: for local data it draws the starts, with the same calls as
    `torch.randint(len(data) - sequence_length, (batch_size,))`; for a remote corpus it draws the step of
    the server's `random` order. A CUDA device is reached through page-locked memory, without blocking.

    Args:
        data: 1-D integer array or memmap, a `RemoteCorpus`, or the URL of one as `from_url` takes it
            (which is looked up at every call: keep a `RemoteCorpus` for more than a try).
        batch_size: rows.
        sequence_length: tokens of a row.

    Returns:
        x, y: each `(batch_size, sequence_length) int64`, contiguous, on the device; y one token further
        than x.

    Raises:
        InvalidArgument: an argument is outside its range, or `data` of another kind.
        DataTooShort: the data holds fewer than `sequence_length + 1` tokens.
    """
    integer("batch_size", batch_size, 1, 2**20)
    integer("sequence_length", sequence_length, 1, 2**20)
    if isinstance(data, str):
        remote = RemoteCorpus.from_url(data)
        try:
            return get_batch(remote, batch_size, sequence_length, device)
        finally:
            remote.close()
    if not isinstance(data, RemoteCorpus):
        data = _checked_array(data)
    num_starts = len(data) - sequence_length
    if num_starts < 1:
        raise errors.DataTooShort(
            f"data must hold at least sequence_length + 1 = {sequence_length + 1} tokens, got {len(data)}"
        )
    device = torch.device(device)
    shape = (batch_size, sequence_length + 1)
    if isinstance(data, RemoteCorpus):
        stored = _host_tensor(shape, STORED_DTYPES[data.dtype], device)
        step = int(torch.randint(RANDOM_STEPS, ()))
        view = memoryview(stored.view(torch.uint8).numpy().data).cast("B")
        data.draw_into(view, batch_size=batch_size, seq_len=sequence_length, step=step)
    else:
        starts = torch.randint(num_starts, (batch_size,)).numpy()
        stored = _host_tensor(
            shape, torch.from_numpy(np.empty(0, data.dtype.newbyteorder("="))).dtype, device
        )
        stored.numpy()[:] = np.lib.stride_tricks.sliding_window_view(data, sequence_length + 1)[starts]
    if device.type == "cpu":
        return widened(stored[:, :-1], torch.int64), widened(stored[:, 1:], torch.int64)
    # The pinned block returns to torch's host allocator, which waits for the copy before reuse.
    tokens = stored.to(device, non_blocking=True)
    return tokens[:, :-1].to(torch.int64).contiguous(), tokens[:, 1:].to(torch.int64).contiguous()


def _checked_array(data: object) -> npt.NDArray[np.integer]:
    if not isinstance(data, np.ndarray):
        raise errors.InvalidArgument(
            f"data must be a NumPy array, a memmap or a RemoteCorpus, got {type(data).__name__}"
        )
    if data.ndim != 1 or not np.issubdtype(data.dtype, np.integer):
        raise errors.InvalidArgument(f"data must be a 1-D integer array, got {data.ndim}-D {data.dtype}")
    return data


def _host_tensor(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
