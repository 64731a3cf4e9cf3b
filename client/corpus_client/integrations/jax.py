"""JAX: the batches of an `ArrayLoader` as device arrays with a sharding; torch is neither needed nor loaded.

sharding = NamedSharding(mesh, PartitionSpec("data"))
loader = ArrayLoader(url, corpus="web", seq_len=1024, global_batch_size=512, **process_place(sharding))
for batch in device_batches(loader, sharding):
    state = train_step(state, batch.inputs, batch.targets)
    checkpoint["data"] = batch.state_after()
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from corpus_client import errors
from corpus_client.arrays import ArrayBatch, ArrayLoader

NUM_AHEAD = 2
"""Batches on the devices or on their way: one that the caller computes with, one whose transfer has begun."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceBatch:
    """A step's global batch. It unpacks into `inputs, targets`.

    inputs, targets: `(global_batch_size, seq_len)`, with the sharding asked for; targets one token further.
    sources: `(global_batch_size,) uint16`; None where the loader was not asked for them.
    loss_mask: `(global_batch_size, seq_len)`, bool or float32, see `ArrayBatch`. Both have the rows'
    sharding.
    """

    step: int
    inputs: jax.Array
    targets: jax.Array
    source: ArrayBatch = field(repr=False)
    sources: jax.Array | None = None
    loss_mask: jax.Array | None = None

    def state_after(self) -> dict[str, Any]:
        """Return the state to save once this batch was trained on; the batches put ahead do not count."""
        return self.source.state_after()

    def __iter__(self) -> Iterator[jax.Array]:
        return iter((self.inputs, self.targets))


def process_place(sharding: Sharding) -> dict[str, int]:
    """Return the rank and world size of an `ArrayLoader` whose rows are those of this process's devices.

    Processes whose devices need the same rows, as under tensor parallelism, get the same rank and send the
    same requests. With 4 row shards over 2 processes of 2 devices each, process 1 gets rank 1 of 2.

    Raises:
        InvalidArgument: the rows of this process's devices are not the block of one rank.
    """
    rows, num_shards = _row_sharding(sharding)
    indices = rows.addressable_devices_indices_map((num_shards,)).values()
    held = sorted({index[0].start or 0 for index in indices if index is not None})
    first, count = held[0], len(held)
    if held != list(range(first, first + count)) or first % count or num_shards % count:
        raise errors.InvalidArgument(
            f"the rows of a process must be one block; this one's devices hold the shards {held} of "
            f"{num_shards}; order the mesh's devices by process, as jax.make_mesh does"
        )
    return {"rank": first // count, "world_size": num_shards // count}


def device_batches(
    loader: ArrayLoader, sharding: Sharding, *, dtype: Any = np.int32
) -> Iterator[DeviceBatch]:
    """Yield the loader's batches as global arrays; the next one's transfer begins before one is yielded.

    Tokens travel to the devices once, as stored; they are cut into inputs and targets and widened there.

    Args:
        sharding: of inputs and targets. Its second dimension, if it has one, may split the sequence.
        dtype: of inputs and targets.

    Raises:
        InvalidArgument: the loader has other rows than this process's devices need.
    """
    place = process_place(sharding)
    if loader.place != (place["rank"], place["world_size"]):
        raise errors.InvalidArgument(
            "the loader's rank and world_size must be those of the sharding's rows, got {} of {} and {} of "
            "{}; pass **process_place(sharding) to ArrayLoader".format(*loader.place, *place.values())
        )
    rows, _ = _row_sharding(sharding)
    split = jax.jit(
        lambda tokens: (tokens[:, :-1].astype(dtype), tokens[:, 1:].astype(dtype)),
        out_shardings=(sharding, sharding),
    )

    def put(batch: ArrayBatch) -> DeviceBatch:
        tokens = batch.tokens
        if tokens.dtype.itemsize > 4:
            tokens = tokens.astype(np.int32)  # JAX has 8-byte integers only where jax_enable_x64 is set

        def whole(part: Any) -> jax.Array:
            shape = (len(part) * place["world_size"], *part.shape[1:])
            return jax.make_array_from_process_local_data(rows, part, shape)

        inputs, targets = split(whole(tokens))
        beside = {"sources": batch.sources, "loss_mask": batch.loss_mask}
        on_devices = {name: whole(array) for name, array in beside.items() if array is not None}
        return DeviceBatch(step=batch.step, inputs=inputs, targets=targets, source=batch, **on_devices)

    ahead: deque[DeviceBatch] = deque()
    try:
        for batch in loader:
            ahead.append(put(batch))
            if len(ahead) == NUM_AHEAD:
                yield ahead.popleft()
        while ahead:
            yield ahead.popleft()
    finally:
        if ahead:  # after a `break` or an error the loader goes on with the first batch that was not yielded
            loader.seek(ahead[0].step)


def _row_sharding(sharding: Sharding) -> tuple[Sharding, int]:
    """Return the sharding of whole rows, and over how many shards the rows are divided."""
    if not isinstance(sharding, NamedSharding):
        if not sharding.is_fully_replicated:
            raise errors.InvalidArgument(f"sharding must be a NamedSharding or of one device, got {sharding}")
        return sharding, 1
    axes = sharding.spec[0] if sharding.spec else None
    names = () if axes is None else (axes,) if isinstance(axes, str) else axes
    num_shards = math.prod(sharding.mesh.shape[name] for name in names)
    return NamedSharding(sharding.mesh, PartitionSpec(names or None)), num_shards
