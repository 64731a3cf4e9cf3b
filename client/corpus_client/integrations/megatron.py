"""Megatron-LM: the provider of `pretrain_gpt.py` for `--dataloader-type external`.

    from corpus_client.integrations.megatron import loaders_provider
    train_valid_test_datasets_provider = loaders_provider(url, train={"corpus": "web"})

These lines stand above `if __name__ == "__main__"`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from megatron.core import mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches

from corpus_client import errors
from corpus_client.integrations.feed import MicroBatches
from corpus_client.loader import CorpusLoader
from corpus_client.plan.world import Placement

Loaders = tuple["MegatronLoader | None", ...]
Provider = Callable[..., Loaders]

REFUSED = {
    "create_attention_mask_in_dataloader": "pass --no-create-attention-mask-in-dataloader",
    "reset_attention_mask": "leave --reset-attention-mask out",
    "full_validation": "leave --full-validation out; validation is of --eval-iters steps",
}
"""Options that need something of a dataset which a plan's batches do not have, and what to do about them."""


class MegatronLoader:
    """Yield micro batches as `get_batch` of `pretrain_gpt.py` takes them; Megatron fetches none ahead.

    tokens, labels, position_ids: `(micro_batch_size, seq_length) int64`; loss_mask: float32.
    """

    def __init__(self, loader: CorpusLoader, args: Any, *, is_training: bool) -> None:
        self._args = args
        self._is_training = is_training
        rows = args.micro_batch_size if is_training else _eval(args, "micro_batch_size")
        self._micro = MicroBatches(loader, rows)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """Return the next micro batch."""
        begins = self._micro.num_left == 0
        part = next(self._micro)
        found = self._micro.num_left + 1
        if self._is_training and begins and found != get_num_microbatches():
            raise errors.InvalidArgument(
                f"step {part.step} of the plan has {found} micro batches for this rank, Megatron's "
                f"iteration {get_num_microbatches()}; the plan's global_batch_size must be "
                "--global-batch-size, at each iteration (--rampup-batch-size needs a plan with such stages)"
            )
        shape, device = part.inputs.shape, part.inputs.device
        position_ids = (
            part.position_ids if self._args.reset_position_ids else torch.arange(shape[1], device=device)
        )
        mask = part.loss_mask if self._args.eod_mask_loss else part.corpus_mask
        return {
            "tokens": part.inputs,
            "labels": part.targets,
            "loss_mask": torch.ones(shape, device=device) if mask is None else mask.float(),
            "position_ids": position_ids.expand(shape).contiguous(),
        }

    def save_state(self) -> dict[str, Any]:
        """Return the state; Megatron asks for it with each checkpoint where `--dataloader-save` is given."""
        return self._micro.state_dict()


def loaders_provider(
    urls: str | Sequence[str],
    *,
    train: Mapping[str, Any],
    valid: Mapping[str, Any] | None = None,
    test: Mapping[str, Any] | None = None,
) -> Provider:
    """Return a `train_valid_test_datasets_provider`; an iteration of Megatron is a step of the plan.

    Training begins at `args.iteration`, so a checkpoint of Megatron is enough to resume. With
    `--dataloader-save` it holds the plan as well, which is compared. Nothing of it depends on how many ranks
    there are.

    Args:
        train, valid, test: options of `CorpusLoader`; `seq_len` and `global_batch_size` are Megatron's unless
            there is a whole `plan`. None: Megatron gets no such data.
    """

    def provider(num_samples: object = None, vp_stage: int | None = None) -> Loaders:
        from megatron.training import get_args

        args = get_args()
        _check(args)
        if mpu.get_tensor_model_parallel_rank() != 0:
            return None, None, None  # the first rank of the group sends them its micro batches
        eval_size = _eval(args, "global_batch_size")
        trained = _open(urls, train, args, args.global_batch_size, args.iteration, _saved(args))
        validated = _open(urls, valid, args, eval_size, args.consumed_valid_samples // eval_size)
        tested = _open(urls, test, args, eval_size, 0)
        loaders = ((trained, True), (validated, False), (tested, False))
        return tuple(
            None if loader is None else MegatronLoader(loader, args, is_training=is_training)
            for loader, is_training in loaders
        )

    provider.is_distributed = True  # type: ignore[attr-defined]  # called on every rank
    return provider


def _open(
    urls: str | Sequence[str],
    options: Mapping[str, Any] | None,
    args: Any,
    global_batch_size: int,
    step: int,
    state: Mapping[str, Any] | None = None,
) -> CorpusLoader | None:
    """Return a loader at a step; with a state, compared with it."""
    if options is None:
        return None
    rank, world_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    shape = {} if "plan" in options else {"seq_len": args.seq_length, "global_batch_size": global_batch_size}
    loader = CorpusLoader(urls, placement=Placement(rank=rank, world_size=world_size), **shape, **options)
    if state is None:
        loader.seek(step)
    else:
        loader.load_state_dict(state, trained_steps=step)
    return loader


def _saved(args: Any) -> dict[str, Any] | None:
    """Return the state beside the checkpoint that was loaded, whatever parallelism it was saved with."""
    if not getattr(args, "dataloader_save", None):
        return None
    folder = Path(args.dataloader_save, f"iter_{args.iteration:07d}")
    found = next(folder.glob("*/train_dataloader_dprank000.pt"), None)
    return None if found is None else torch.load(found, weights_only=True)["dataloader_state_dict"]


def _check(args: Any) -> None:
    if args.dataloader_type != "external":
        raise errors.InvalidArgument(f"--dataloader-type must be external, got {args.dataloader_type!r}")
    for name, remedy in REFUSED.items():
        if getattr(args, name, False):
            raise errors.InvalidArgument(f"--{name.replace('_', '-')} needs what a plan has not; {remedy}")


def _eval(args: Any, name: str) -> int:
    """Return an option of validation, which older versions of Megatron share with training."""
    return int(getattr(args, f"eval_{name}", None) or getattr(args, name))
