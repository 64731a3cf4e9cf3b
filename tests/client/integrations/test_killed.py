"""Two ranks are killed at a step that is no checkpoint; two go on, or one, and miss no row."""

from __future__ import annotations

import json
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from corpus_client import CorpusIterableDataset, CorpusLoader
from tests.client.integrations.ranks import IN_FRAMEWORK, PLAN, QUICK, VOCABULARY, needs, on_ranks, rows_of
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import ReferenceServer

pytestmark = IN_FRAMEWORK

NUM_STEPS, SAVE_EVERY, KILLED_AT = 8, 3, 5
"""So the checkpoint is that of step 3."""


@dataclass(frozen=True)
class Run:
    """What a rank does. resume: from the checkpoint in `folder`; else it dies after `KILLED_AT` steps."""

    url: str
    folder: Path
    resume: bool

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"])

    def saw(self, rows: torch.Tensor) -> None:
        """Note a batch that is being trained on; die where it is time."""
        path = self.folder / f"seen-{self.rank}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(rows.tolist()) + "\n")
        if not self.resume and len(path.read_text().splitlines()) == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    def loop(self, batches: Iterable[Any], state: Callable[[Any], Any]) -> None:
        """A plain loop of several ranks; rank 0 saves `state` of the batch it has just trained on."""
        first = SAVE_EVERY if self.resume else 0
        for step, batch in enumerate(batches, first):
            self.saw(batch.tokens)
            if torch.distributed.is_initialized():
                torch.distributed.barrier()
            if self.rank == 0 and (step + 1) % SAVE_EVERY == 0:
                (self.folder / f"data-{step + 1}.json").write_text(json.dumps(state(batch)))

    def saved(self) -> Any:
        return json.loads((self.folder / f"data-{SAVE_EVERY}.json").read_text())


def process_group() -> None:
    torch.distributed.init_process_group("gloo")


def bare_loop(run: Run) -> None:
    process_group()
    with CorpusLoader(run.url, **PLAN, num_steps=NUM_STEPS, device="cpu", **QUICK) as loader:
        if run.resume:
            loader.load_state_dict(run.saved(), trained_steps=SAVE_EVERY)
        run.loop(loader, lambda batch: batch.state_after())


def data_loader(run: Run) -> None:
    process_group()
    dataset = CorpusIterableDataset(run.url, **PLAN, num_steps=NUM_STEPS, **QUICK)
    if run.resume:
        dataset.load_state_dict(run.saved(), trained_steps=SAVE_EVERY)
    run.loop(
        DataLoader(dataset, batch_size=None, num_workers=1), lambda batch: dataset.state_at(batch.step + 1)
    )


def stateful_data_loader(run: Run) -> None:
    from corpus_client.integrations.torchdata import StatefulCorpusLoader

    process_group()
    dataset = CorpusIterableDataset(run.url, **PLAN, num_steps=NUM_STEPS, **QUICK)
    batches = StatefulCorpusLoader(dataset, num_workers=2)
    if run.resume:
        batches.load_state_dict(run.saved(), trained_steps=SAVE_EVERY)
    run.loop(batches, lambda _: batches.state_dict())


def accelerate_loop(run: Run) -> None:
    from accelerate import Accelerator

    from corpus_client.integrations.accelerate import AccelerateLoader

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = AccelerateLoader(accelerator, run.url, **PLAN, num_steps=NUM_STEPS, **QUICK)
    if run.resume:
        accelerator.load_state(str(run.folder / f"state-{SAVE_EVERY}"))
    for step, batch in enumerate(loader, SAVE_EVERY if run.resume else 0):
        run.saw(batch["input_ids"])
        with accelerator.accumulate(model):
            accelerator.backward(model(batch["input_ids"][:, :1].float()).mean())
            optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            accelerator.save_state(str(run.folder / f"state-{step + 1}"))


def accelerate_skipping(run: Run) -> None:
    from accelerate import Accelerator

    from corpus_client.integrations.accelerate import already_sharded

    accelerator = Accelerator(cpu=True)
    dataset = CorpusIterableDataset(run.url, **PLAN, num_steps=NUM_STEPS, **QUICK)
    batches = accelerator.prepare(already_sharded(DataLoader(dataset, batch_size=None), accelerator))
    run.loop(accelerator.skip_first_batches(batches, SAVE_EVERY) if run.resume else batches, lambda _: None)


def hugging_face_trainer(run: Run) -> None:
    from transformers import Trainer, TrainingArguments

    from corpus_client.integrations.transformers import train_from
    from tests.client.integrations.test_transformers import model

    class Recording(Trainer):
        def training_step(self, model: Any, inputs: Any, *arguments: Any) -> Any:
            run.saw(inputs["input_ids"])
            return super().training_step(model, inputs, *arguments)

    arguments = TrainingArguments(
        str(run.folder),
        num_train_epochs=2,
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo",
    )
    trainer = train_from(Recording(model(), arguments), run.url, **PLAN, num_steps=NUM_STEPS // 2, **QUICK)
    trainer.train(resume_from_checkpoint=run.resume)


def sft_trainer(run: Run) -> None:
    import datasets
    import tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    from corpus_client.integrations.causal_lm import packed_lm
    from corpus_client.integrations.transformers import train_from
    from tests.client.integrations.test_transformers import model

    class Recording(SFTTrainer):
        def training_step(self, model: Any, inputs: Any, *arguments: Any) -> Any:
            run.saw(inputs["input_ids"])
            return super().training_step(model, inputs, *arguments)

    words = tokenizers.models.WordLevel({"<eos>": 0}, unk_token="<eos>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), eos_token="<eos>")
    arguments = SFTConfig(
        str(run.folder),
        max_steps=NUM_STEPS,
        save_steps=SAVE_EVERY,
        use_cpu=True,
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        ddp_backend="gloo",
    )
    unused = datasets.Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]})
    trainer = Recording(model(), arguments, train_dataset=unused, processing_class=tokenizer)
    train_from(trainer, run.url, convert=packed_lm, **PLAN, eot_id=0, **QUICK)
    trainer.train(resume_from_checkpoint=run.resume)


def olmo_core(run: Run) -> None:
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import AdamWConfig
    from olmo_core.train import Duration, TrainerConfig, prepare_training_environment
    from olmo_core.train.callbacks import CheckpointerCallback
    from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModule

    from corpus_client.integrations.olmo_core import CorpusDataLoader

    class Recording(TransformerTrainModule):
        def train_batch(self, batch: Any, dry_run: bool = False) -> Any:
            if not dry_run:
                run.saw(torch.cat((batch["input_ids"], batch["labels"][:, -1:]), dim=1))
            return super().train_batch(batch, dry_run)

    prepare_training_environment(seed=0, backend="cpu:gloo")
    module = Recording(
        TransformerConfig.olmo2_1M(VOCABULARY, n_layers=1).build(),
        AdamWConfig(),
        rank_microbatch_size=2 * PLAN["seq_len"],
        max_sequence_length=PLAN["seq_len"],
        dp_config=TransformerDataParallelConfig(name=DataParallelType.ddp),
        device=torch.device("cpu"),
    )
    data = CorpusDataLoader(
        run.url, work_dir=run.folder, dp_process_group=module.dp_process_group, **PLAN, **QUICK
    )
    config = TrainerConfig(str(run.folder), max_duration=Duration.steps(NUM_STEPS), device="cpu")
    saving = CheckpointerCallback(save_interval=SAVE_EVERY, save_async=False)
    config.with_callback("checkpointer", saving).build(module, data).fit()


def lightning(run: Run, kind: str) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from corpus_client.integrations.lightning import CorpusDataModule
    from corpus_client.integrations.torchdata import StatefulCorpusLoader

    os.environ["TORCHELASTIC_RUN_ID"] = "tests"  # Lightning must not start its processes
    warnings.simplefilter("ignore")

    def loader() -> Any:
        if kind == "module":
            return StatefulCorpusLoader(CorpusIterableDataset(run.url, **PLAN, num_steps=NUM_STEPS, **QUICK))
        return CorpusLoader(run.url, **PLAN, num_steps=NUM_STEPS, device="cpu", **QUICK)

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(VOCABULARY, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            run.saw(batch.tokens)
            return self.table(batch.inputs).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class WithData(Model):
        def train_dataloader(self) -> Any:
            return loader()

    every = ModelCheckpoint(
        run.folder,
        filename="{step}",
        save_top_k=-1,
        every_n_train_steps=SAVE_EVERY,
        enable_version_counter=False,
    )
    trainer = Trainer(
        accelerator="cpu",
        max_steps=NUM_STEPS,
        callbacks=[every],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
    )
    given: dict[str, Any] = {}
    if kind == "data module":
        given["datamodule"] = CorpusDataModule(run.url, **PLAN, **QUICK)
    elif kind == "raw loop":
        given["train_dataloaders"] = loader()
    model = WithData() if kind == "module" else Model()
    trainer.fit(model, **given, ckpt_path=run.folder / f"step={SAVE_EVERY}.ckpt" if run.resume else None)


TRAINERS: list[Any] = [
    # These need no framework. They take a minute, so they run where the others do.
    *(
        pytest.param(each, (), marks=needs("accelerate"))
        for each in (bare_loop, data_loader, stateful_data_loader)
    ),
    pytest.param(accelerate_loop, (), marks=needs("accelerate")),
    pytest.param(accelerate_skipping, (), marks=needs("accelerate")),
    pytest.param(hugging_face_trainer, (), marks=needs("transformers", "accelerate")),
    pytest.param(sft_trainer, (), marks=needs("trl")),
    pytest.param(olmo_core, (), marks=needs("olmo_core")),
    *(
        pytest.param(lightning, (kind,), marks=needs("lightning"))
        for kind in ("data module", "module", "raw loop")
    ),
]


def job(train: Callable[..., None], url: str, folder: str, resume: bool, arguments: tuple[str, ...]) -> None:
    train(Run(url, Path(folder), resume), *arguments)


@pytest.mark.parametrize(("train", "arguments"), TRAINERS)
def test_every_row_from_the_checkpoint_on_is_seen_once(
    server: ReferenceServer, corpus: ReferenceCorpus, tmp_path: Path, train: Any, arguments: tuple[str, ...]
) -> None:
    begun = tmp_path / "begun"
    begun.mkdir()
    on_ranks(2, tmp_path, job, train, server.url, str(begun), False, arguments)
    (plan,) = (plan for plan in server.plans.values() if plan["seed"] == PLAN["seed"])
    for rank in range(2):
        seen = [json.loads(line) for line in (begun / f"seen-{rank}.jsonl").read_text().splitlines()]
        assert seen == [rows_of(corpus, plan, step, rank, 2) for step in range(len(seen))]
        assert KILLED_AT - 1 <= len(seen) <= KILLED_AT
        (begun / f"seen-{rank}.jsonl").unlink()
    for world_size in (2, 1):
        resumed = shutil.copytree(begun, tmp_path / f"resumed-{world_size}")
        done = on_ranks(world_size, tmp_path, job, train, server.url, str(resumed), True, arguments)
        assert len(done) == world_size
        for rank in range(world_size):
            seen = [json.loads(line) for line in (resumed / f"seen-{rank}.jsonl").read_text().splitlines()]
            steps = range(SAVE_EVERY, NUM_STEPS)
            assert seen == [rows_of(corpus, plan, step, rank, world_size) for step in steps]
