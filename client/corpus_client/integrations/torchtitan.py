"""torchtitan: a dataloader for its `Trainer.Config`.

    config.dataloader = CorpusDataLoader.Config(
        urls="http://data:8000", options={"corpus": "web", "global_batch_size": 512}
    )

For torchtitan 0.3 and for its main branch, where a batch is one sequence of tokens. Both fetch the micro
batches of a step before they train on the first, and none of the next step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import tyro

from corpus_client import errors
from corpus_client.batch import Batch
from corpus_client.integrations.feed import MicroBatches, masked_targets, open_at

try:
    from torchtitan.components.data.loader import BaseDataLoader
except ModuleNotFoundError:  # 0.3
    from torchtitan.components.dataloader import BaseDataLoader

IGNORED = -100
"""Labels that torchtitan's losses leave out."""


class CorpusDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Give torchtitan the steps of a plan in its micro batches; a state does not depend on the degrees.

    Unlike torchtitan's own loaders, it resumes with another data-parallel degree.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Where batches come from.

        options: of `CorpusLoader`, without `seq_len`, `placement` and `device`. The plan's global_batch_size
            must be torchtitan's, and its seq_len, where a whole `plan` is given.
        infinite, repeat: what torchtitan's validator sets, the former in 0.3; False needs `num_steps` among
            the options.
        """

        urls: str = ""
        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        infinite: bool = True
        repeat: bool = True

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int = 0,
        local_batch_size: int = 0,
        max_context_length: int = 0,
        num_tokens_per_batch: int = 0,
        **_: object,
    ) -> None:
        self._is_flat = num_tokens_per_batch > 0
        if self._is_flat:
            seq_len, local_batch_size = max_context_length, num_tokens_per_batch // max_context_length
            if num_tokens_per_batch % max_context_length:
                raise errors.InvalidArgument(
                    "num_tokens_per_microbatch_per_dp_rank must be divisible by max_context_length, got "
                    f"{num_tokens_per_batch} and {max_context_length}; each row has max_context_length tokens"
                )
        options = dict(config.options)
        if "plan" not in options:
            options["seq_len"] = seq_len
        if not (config.infinite and config.repeat) and "num_steps" not in options:
            raise errors.InvalidArgument(
                "a pass that ends, as validation with steps=-1, needs options num_steps"
            )
        if taken := sorted({"device", "placement"} & options.keys()):
            raise errors.InvalidArgument(f"torchtitan sets {' and '.join(taken)}; leave them out of options")
        # torchtitan moves each micro batch to its device itself.
        loader = open_at(config.urls, (dp_rank, dp_world_size), "cpu", options)
        if loader.plan["seq_len"] != seq_len:
            raise errors.InvalidArgument(
                f"the plan's seq_len must be torchtitan's, got {loader.plan['seq_len']} and {seq_len}"
            )
        self._has_eot = loader.prepared.eot_id is not None
        self._micro = MicroBatches(loader, local_batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for part in self._micro:
            inputs, labels = {"input": part.inputs}, masked_targets(part, IGNORED)
            if self._has_eot or self._is_flat:  # of a flat batch positions alone say where a row begins
                inputs["positions"] = self._positions(part)
            if self._is_flat:
                inputs, labels = {name: each.flatten() for name, each in inputs.items()}, labels.flatten()
            yield inputs, labels

    def _positions(self, part: Batch) -> torch.Tensor:
        if self._has_eot:
            return part.position_ids
        return torch.arange(part.inputs.shape[1]).expand(part.inputs.shape)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, as one text: DCP would want the same fields in another plan's state."""
        return {"state": json.dumps(self._micro.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the state's next step."""
        self._micro.load_state_dict(json.loads(state_dict["state"]))

    def close(self) -> None:
        """Stop fetching."""
        self._micro.loader.close()
