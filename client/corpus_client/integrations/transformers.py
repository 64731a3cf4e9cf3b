"""Hugging Face Trainer: batches of a plan, resumed without replaying the earlier ones.

trainer = train_from(Trainer(model, args), url, corpus="web", seq_len=1023, global_batch_size=512)
trainer.train(resume_from_checkpoint=True)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from corpus_client import errors
from corpus_client.integrations.accelerate import place_of
from corpus_client.integrations.causal_lm import causal_lm
from corpus_client.integrations.feed import Feed
from corpus_client.loader import CorpusLoader
from corpus_client.plan.world import Placement


def train_from(trainer: Trainer, urls: str | Sequence[str], **options: Any) -> Trainer:
    """Let a Trainer train on the batches of a plan; return it.

    Each batch is a step of the plan, also under gradient accumulation: `global_batch_size` is the rows that
    all ranks take at a time, whatever `per_device_train_batch_size` says. `seq_len` is one less than the
    length that the model sees (see `causal_lm`). A checkpoint's trainer_state.json holds the place in the
    plan.

    Args:
        options: of `CorpusLoader`. Device and placement are the trainer's unless given.
    """
    rank, world_size = place_of(trainer.accelerator)
    found = {"device": trainer.args.device, "placement": Placement(rank=rank, world_size=world_size)}
    feed = Feed(CorpusLoader(urls, **{**found, **options}), causal_lm)
    trainer.get_train_dataloader = lambda: feed
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
