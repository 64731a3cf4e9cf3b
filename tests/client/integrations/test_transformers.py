"""Inside HF Trainer: the plan's batches, a resume without a replay, labels shifted once."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from corpus_client import errors
from tests.client.integrations.ranks import IN_FRAMEWORK, PLAN, QUICK, VOCABULARY, needs, on_ranks, rows_of
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import ReferenceServer

pytestmark = [needs("transformers", "accelerate"), *IN_FRAMEWORK]

MAX_STEPS, ACCUMULATE = 6, 2


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=32,
        )
    )


def train(url: str, folder: str, stop_at: int, resume: bool) -> dict[str, Any]:
    """Train to `stop_at` optimizer steps, or go on from the checkpoint there; return windows and losses."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from corpus_client.integrations.transformers import train_from

    seen: list[Any] = []

    class Recording(Trainer):
        def training_step(self, model: Any, inputs: Any, *arguments: Any) -> Any:
            seen.append(inputs["input_ids"].tolist())
            return super().training_step(model, inputs, *arguments)

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == stop_at:
                control.should_training_stop = True

    arguments = TrainingArguments(
        folder,
        max_steps=MAX_STEPS,
        gradient_accumulation_steps=ACCUMULATE,
        save_strategy="steps",
        save_steps=1,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
        learning_rate=0.1,
    )
    trainer = train_from(Recording(model(), arguments, callbacks=[Stop()]), url, **PLAN, **QUICK)
    trainer.train(resume_from_checkpoint=resume)
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    return {"seen": seen, "losses": losses}


def test_two_ranks_are_interrupted_and_one_goes_on(
    server: ReferenceServer, corpus: ReferenceCorpus, tmp_path: Path
) -> None:
    stop_at = random.Random(13).randrange(1, MAX_STEPS)
    folder = str(tmp_path / "trained")
    found = on_ranks(2, tmp_path, train, server.url, folder, stop_at, False)
    (plan,) = (plan for plan in server.plans.values() if plan["seed"] == PLAN["seed"])
    for rank, each in enumerate(found):
        assert each["seen"] == [rows_of(corpus, plan, step, rank, 2) for step in range(stop_at * ACCUMULATE)]
    resumed = train(server.url, folder, -1, True)
    steps = range(stop_at * ACCUMULATE, MAX_STEPS * ACCUMULATE)
    assert resumed["seen"] == [rows_of(corpus, plan, step) for step in steps]
    whole = train(server.url, str(tmp_path / "whole"), -1, False)
    assert whole["losses"] == pytest.approx(found[0]["losses"] + resumed["losses"][stop_at:], abs=2e-3)


def test_the_loss_is_that_of_inputs_and_targets(server: ReferenceServer, corpus: ReferenceCorpus) -> None:
    from corpus_client import CorpusLoader
    from corpus_client.integrations.causal_lm import causal_lm

    llama = model()
    with CorpusLoader(server.url, **PLAN, **QUICK, device="cpu") as loader:
        batch = next(loader)
    logits = llama(input_ids=batch.inputs).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    assert llama(**causal_lm(batch)).loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_packed_no_document_sees_another_one(server: ReferenceServer) -> None:
    """The sum of the losses is that of the documents, each given alone."""
    from corpus_client import CorpusLoader
    from corpus_client.integrations.causal_lm import packed_lm

    llama = model()
    with CorpusLoader(server.url, **PLAN, eot_id=7, device="cpu", **QUICK) as loader:
        found = packed_lm(next(loader))
    total, count = 0.0, 0
    for ids, starts in zip(found["input_ids"], found["position_ids"] == 0, strict=True):
        for document in ids.tensor_split(starts.nonzero().flatten()[1:]):
            if len(document) > 1:
                loss = llama(input_ids=document[None], labels=document[None]).loss
                total, count = total + loss.item() * (len(document) - 1), count + len(document) - 1
    assert 0 < count < found["labels"].numel() - len(found["labels"])
    assert (found["labels"] != -100).sum() == count
    assert llama(**found).loss.item() == pytest.approx(total / count, rel=1e-5)


def test_checkpoints_that_do_not_fit_are_refused(server: ReferenceServer, tmp_path: Path) -> None:
    train(server.url, str(tmp_path), 2, False)
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    place = state["stateful_callbacks"]["CorpusCallback"]["attributes"]["place"]
    place["global_step"] = 1
    path.write_text(json.dumps(state))
    with pytest.raises(errors.StateMismatch, match="saved at global_step 1, the Trainer's state at 2"):
        train(server.url, str(tmp_path), 3, True)
    place["global_step"], place["data"]["plan"]["seed"] = 2, 9
    path.write_text(json.dumps(state))
    with pytest.raises(errors.StateMismatch, match="seed: the state has 9, this loader 5"):
        train(server.url, str(tmp_path), 3, True)
    del state["stateful_callbacks"]["CorpusCallback"]
    path.write_text(json.dumps(state))
    with pytest.raises(errors.StateMismatch, match="checkpoint of step 2 has no CorpusCallback"):
        train(server.url, str(tmp_path), 3, True)


def test_evaluation_is_of_the_plans_batches(server: ReferenceServer, tmp_path: Path) -> None:
    """And epochs of `num_steps` go on in the plan, which `test_killed.py` shows."""
    from transformers import Trainer, TrainingArguments

    from corpus_client import CorpusIterableDataset, CorpusLoader
    from corpus_client.integrations.causal_lm import causal_lm
    from corpus_client.integrations.transformers import train_from

    held_out = {**PLAN, "seed": 8, "num_steps": 3}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, eval_strategy="steps", eval_steps=1, use_cpu=True, report_to=[]
    )
    dataset = CorpusIterableDataset(server.url, **held_out, **QUICK)
    llama = model()
    trainer = train_from(Trainer(llama, arguments, eval_dataset=dataset), server.url, **PLAN, **QUICK)
    trainer.train()
    found = [trainer.evaluate()["eval_loss"] for _ in range(2)]
    with CorpusLoader(server.url, **held_out, **QUICK, device="cpu") as loader, torch.no_grad():
        losses = [llama(**causal_lm(batch)).loss.item() for batch in loader]
    assert found == pytest.approx([sum(losses) / 3] * 2, rel=1e-5)
    sets = {
        name: CorpusIterableDataset(server.url, **{**held_out, "seed": seed}, **QUICK)
        for name, seed in (("a", 8), ("b", 9))
    }
    trainer = train_from(Trainer(llama, arguments, eval_dataset=sets), server.url, **PLAN, **QUICK)
    several = trainer.evaluate()
    assert several["eval_a_loss"] == pytest.approx(found[0], rel=1e-5)
    assert several["eval_b_loss"] != several["eval_a_loss"]
    trainer.args.gradient_accumulation_steps = 2
    with pytest.raises(errors.InvalidArgument, match="num_steps, the steps of an epoch, must be divisible"):
        train_from(trainer, server.url, **PLAN, num_steps=3)
