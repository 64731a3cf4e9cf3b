"""torchtitan: a dataloader for its `Trainer.Config`.

    config.dataloader = CorpusDataLoader.Config(
        urls="http://data:8000", options={"corpus": "web", "global_batch_size": 512}
    )

This is for torchtitan 0.3, whose trainer fetches the micro batches of a step before it trains on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import tyro
from torchtitan.components.dataloader import BaseDataLoader

from corpus_client import errors
from corpus_client.integrations.feed import MicroBatches, masked_targets, open_at

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
        infinite: what torchtitan's validator sets; False needs `num_steps` among the options.
        """

        urls: str = ""
        options: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        infinite: bool = True

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: object,
    ) -> None:
        options = dict(config.options)
        if "plan" not in options:
            options["seq_len"] = seq_len
        if not config.infinite and "num_steps" not in options:
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
            inputs = {"input": part.inputs}
            if self._has_eot:
                inputs["positions"] = part.position_ids
            yield inputs, masked_targets(part, IGNORED)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, as one text: DCP would want the same fields in another plan's state."""
        return {"state": json.dumps(self._micro.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the state's next step."""
        self._micro.load_state_dict(json.loads(state_dict["state"]))

    def close(self) -> None:
        """Stop fetching."""
        self._micro.loader.close()
