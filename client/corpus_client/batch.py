"""`get_batch`: the familiar function, one random batch per call."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import torch

from corpus_client import errors, wire
from corpus_client.device import STORED_DTYPES, widened
from corpus_client.plan import integer
from corpus_client.replicas import Replicas


class RemoteCorpus:
    """A corpus of a server, as `data` of `get_batch`.

    Args:
        url: base URL of the server, `http://host:port` or `uds:///path/of.sock`.
        name: of the corpus.
        headers: sent with every request.
        deadline_seconds: how long one request may be retried.
    """

    def __init__(
        self,
        url: str,
        name: str,
        *,
        headers: Mapping[str, str] | None = None,
        deadline_seconds: float = 300.0,
    ) -> None:
        self.name = name
        self._pid = os.getpid()
        self._replicas = Replicas([url], headers=headers, deadline_seconds=deadline_seconds)
        description = self._replicas.ask(lambda control: control.corpus(name))
        self.dtype = str(description["dtype"])
        self._num_tokens = int(description["num_tokens"])
        if self.dtype not in STORED_DTYPES:
            raise errors.AnswerCorrupt(f"dtype must be one of {list(STORED_DTYPES)}, got {self.dtype!r}")

    @classmethod
    def from_url(cls, url: str) -> RemoteCorpus:
        """The corpus at `http://host:port/name`, or at `uds:///path/of.sock/name`."""
        base, _, name = url.rstrip("/").rpartition("/")
        if base.endswith(("/", ":")) or not name:
            raise errors.InvalidArgument(
                f"a remote corpus must be http://host:port/name or uds:///path/of.sock/name, got {url!r}"
            )
        return cls(base, unquote(name))

    def __len__(self) -> int:
        return self._num_tokens

    def draw_into(self, buffer: memoryview, *, batch_size: int, seq_len: int, seed: int) -> None:
        """Receive random windows at the start of `buffer`: `(batch_size, seq_len + 1)` as stored."""
        if os.getpid() != self._pid:
            raise errors.ForkedLoader("a RemoteCorpus was used in a forked process; make it there")
        path = wire.array_path(
            "/v1/batches",
            verify=True,
            corpus=self.name,
            seq_len=seq_len,
            batch_size=batch_size,
            seed=seed,
            order="random",
            step=0,
        )
        request = wire.ArrayRequest(
            path=path, shape=(1, batch_size, seq_len + 1), dtype=self.dtype, plan_id=None
        )
        self._replicas.finish(self._replicas.begin(request), buffer)

    def close(self) -> None:
        """Close its connections."""
        self._replicas.close()


Data = npt.NDArray[np.integer] | RemoteCorpus | str


def get_batch(
    data: Data, batch_size: int, sequence_length: int, device: str | torch.device = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows at random starts, each start in `[0, len(data) - sequence_length)` equally likely.

    Torch's global generator decides: for local data it draws the starts, with the same calls as
    `torch.randint(len(data) - sequence_length, (batch_size,))`; for a remote corpus it draws the seed of
    the server's `random` order. A CUDA device is reached through page-locked memory, without blocking.

    Args:
        data: 1-D integer array or memmap, a `RemoteCorpus`, or the URL of one as `from_url` takes it
            (which is looked up at every call: keep a `RemoteCorpus` for more than a try).

    Returns:
        x, y: `(batch_size, sequence_length) int64` on the device, y one token further than x; views of
        one tensor.
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
        seed = int(torch.randint(2**63 - 1, ()))
        view = memoryview(stored.view(torch.uint8).numpy().data).cast("B")
        data.draw_into(view, batch_size=batch_size, seq_len=sequence_length, seed=seed)
    else:
        starts = torch.randint(num_starts, (batch_size,)).numpy()
        stored = _host_tensor(
            shape, torch.from_numpy(np.empty(0, data.dtype.newbyteorder("="))).dtype, device
        )
        stored.numpy()[:] = np.lib.stride_tricks.sliding_window_view(data, sequence_length + 1)[starts]
    if device.type == "cpu":
        tokens = widened(stored, torch.int64)
    else:
        # The pinned block returns to torch's host allocator, which waits for the copy before reuse.
        tokens = stored.to(device, non_blocking=True).to(torch.int64)
    return tokens[:, :-1], tokens[:, 1:]


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
