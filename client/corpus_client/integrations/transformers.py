"""Hugging Face Trainer: batches of a plan, resumed without replaying the earlier ones.

trainer = train_from(Trainer(model, args), url, corpus="web", seq_len=1023, global_batch_size=512)
trainer.train(resume_from_checkpoint=True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from corpus_client import errors
from corpus_client.batch import Batch
from corpus_client.dataset import CorpusIterableDataset
from corpus_client.integrations.accelerate import place_of
from corpus_client.integrations.causal_lm import causal_lm
from corpus_client.integrations.feed import Feed, check_place, open_at


def train_from(
    trainer: Trainer,
    urls: str | Sequence[str],
    *,
    convert: Callable[[Batch], Any] = causal_lm,
    **options: Any,
) -> Trainer:
    """Let a Trainer train on the batches of a plan; return it.

    Each batch is a step of the plan, also under gradient accumulation: `global_batch_size` is the rows that
    all ranks take at a time, whatever `per_device_train_batch_size` says. `seq_len` is one less than the
    length that the model sees (see `causal_lm`). A checkpoint's trainer_state.json holds the place in the
    plan.

    An `eval_dataset` that is a `CorpusIterableDataset` is evaluated on as it is: `num_steps` batches of its
    plan, the same each time, on every rank its rows. The Trainer itself makes the DataLoader of any other.

    Args:
        convert: what the model gets of a batch; `packed_lm` where documents must not see one another.
        options: of `CorpusLoader`. Device and placement are the trainer's unless given. `num_steps` is the
            length of an epoch: `num_train_epochs=2` trains on twice as many steps of the plan.
    """
    place = place_of(trainer.accelerator)
    epoch_steps = options.pop("num_steps", None)
    if epoch_steps is not None and epoch_steps % trainer.args.gradient_accumulation_steps:
        raise errors.InvalidArgument(
            "num_steps, the steps of an epoch, must be divisible by gradient_accumulation_steps, got "
            f"{epoch_steps} and {trainer.args.gradient_accumulation_steps}"
        )
    feed = Feed(open_at(urls, place, trainer.args.device, options), convert, epoch_steps=epoch_steps)
    trainer.get_train_dataloader = lambda: feed
    others = trainer.get_eval_dataloader

    def get_eval_dataloader(eval_dataset: Any = None) -> Any:
        dataset = trainer.eval_dataset if eval_dataset is None else eval_dataset
        dataset = trainer.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        if not isinstance(dataset, CorpusIterableDataset):
            return others(eval_dataset)
        check_place(dataset.place, place, "the Trainer")
        dataset.declared = True
        # The function is called with one batch.
        return DataLoader(dataset, batch_size=None, collate_fn=cast("Any", convert))

    trainer.get_eval_dataloader = get_eval_dataloader
    trainer.args.ignore_data_skip = True  # the place is loaded; a Trainer would ask for every earlier batch
    trainer.add_callback(CorpusCallback(feed))
    return trainer


class CorpusCallback(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers is untyped
    """Count the batches trained on, and keep the place in the plan in the Trainer's checkpoints.

    A Trainer asks for all batches of an optimizer step before it trains on the first, and drops the rest
    where it stops: what counts is the end of each training step.
    """

    def __init__(self, feed: Feed | None = None) -> None:
        self._feed = feed
        self._global_step = 0

    def state(self) -> dict[str, Any]:
        """Return what trainer_state.json holds of this callback."""
        place = {"data": self._found_feed.state_dict(), "global_step": self._global_step}
        return {"args": {}, "attributes": {"place": place}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Go to the first step, or to the one that the checkpoint names."""
        feed, name = self._found_feed, type(self).__name__
        self._global_step = state.global_step
        if state.global_step == 0:
            feed.load_state_dict(feed.loader.state_at(0))
            return
        saved = state.stateful_callbacks.get(name)
        if not saved or "place" not in saved["attributes"]:
            raise errors.StateMismatch(
                f"the checkpoint of step {state.global_step} has no {name}: it was not trained from a plan; "
                "start a run from its model, without resume_from_checkpoint"
            )
        place = saved["attributes"]["place"]
        if place["global_step"] != state.global_step:
            raise errors.StateMismatch(
                f"the place in the plan was saved at global_step {place['global_step']}, the Trainer's state "
                f"at {state.global_step}; is trainer_state.json whole?"
            )
        feed.load_state_dict(place["data"])

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Count a batch whose gradients are accumulated."""
        self._found_feed.trained()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Count the last batch of an optimizer step."""
        self._found_feed.trained()
        self._global_step = state.global_step

    @property
    def _found_feed(self) -> Feed:
        if self._feed is None:
            raise errors.InvalidArgument(
                "a CorpusCallback was made by the Trainer from a checkpoint, without its loader; leave out "
                "restore_callback_states_from_checkpoint (the place in the plan is restored anyway)"
            )
        return self._feed
