"""What is measured: the bare loaders, then every integration as its framework's loop sees it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader

from corpus_client import ArrayLoader, CorpusIterableDataset, CorpusLoader, Staging
from corpus_client.integrations.llmc import DistributedDataLoader
from corpus_client.integrations.nanogpt import GetBatch
from scripts.benchmarks.corpus import NAME
from scripts.integrations_lib.measuring import PREFETCH_BYTES, ROWS, SEQ_LEN, Measured, Source

STAGING = Staging(prefetch_bytes=PREFETCH_BYTES)


def bare(source: Source, stack: ExitStack) -> CorpusLoader:
    """Return the loader that integrations for torch stand on."""
    return stack.enter_context(CorpusLoader(source.url, device="cpu", staging=STAGING, **source.plan))


def bare_arrays(source: Source, stack: ExitStack) -> ArrayLoader:
    """Return the loader that integrations without torch stand on."""
    return stack.enter_context(ArrayLoader(source.url, **source.plan))


def opened_loader(source: Source, stack: ExitStack) -> Iterator[object]:
    """Iterate over the bare loader."""
    return iter(bare(source, stack))


def opened_array_loader(source: Source, stack: ExitStack) -> Iterator[object]:
    """Iterate over the bare loader of arrays."""
    return iter(bare_arrays(source, stack))


def opened_nanogpt(source: Source, stack: ExitStack) -> Iterator[object]:
    """Call `get_batch("train")` as `train.py` does."""
    get_batch = stack.enter_context(
        GetBatch(source.url, {"train": NAME}, ROWS, SEQ_LEN, device="cpu", staging=STAGING)
    )
    return iter(lambda: get_batch("train"), None)


def opened_llmc(source: Source, stack: ExitStack) -> Iterator[object]:
    """Call `next_batch()` as `train_gpt2.py` does; the order is sequential."""
    url = f"{source.url}/{NAME}"
    loader = stack.enter_context(DistributedDataLoader(url, ROWS, SEQ_LEN, 0, 1, staging=STAGING))
    return iter(loader.next_batch, None)


def opened_accelerate(source: Source, stack: ExitStack) -> Iterator[object]:
    """Iterate as a loop under `accumulate` does."""
    from accelerate import Accelerator

    from corpus_client.integrations.accelerate import AccelerateLoader

    loader = AccelerateLoader(Accelerator(cpu=True), source.url, staging=STAGING, **source.plan)
    stack.callback(loader.loader.close)
    return iter(loader)


def opened_trainer(source: Source, stack: ExitStack) -> Iterator[object]:
    """Iterate over what a Trainer asks for."""
    from transformers import Trainer, TrainingArguments

    from corpus_client.integrations.transformers import train_from

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    arguments = TrainingArguments(folder, max_steps=1, use_cpu=True, report_to=[])
    trainer = train_from(
        Trainer(torch.nn.Embedding(1, 1), arguments), source.url, staging=STAGING, **source.plan
    )
    feed = trainer.get_train_dataloader()
    stack.callback(feed.loader.close)
    return iter(feed)


def opened_data_loader(source: Source, stack: ExitStack) -> Iterator[object]:
    """Iterate over torch's DataLoader with a worker, which has no integration: what it costs by itself."""
    dataset = CorpusIterableDataset(source.url, staging=STAGING, **source.plan)
    return stack.enter_context(
        closing(batch for batch in DataLoader(dataset, batch_size=None, num_workers=1))
    )


def opened_stateful(source: Source, stack: ExitStack) -> Iterator[object]:
    """Iterate over a StatefulDataLoader with a worker."""
    from corpus_client.integrations.torchdata import StatefulCorpusLoader

    dataset = CorpusIterableDataset(source.url, staging=STAGING, **source.plan)
    return stack.enter_context(closing(batch for batch in StatefulCorpusLoader(dataset, num_workers=1)))


def opened_lightning(source: Source, stack: ExitStack) -> Iterator[object]:
    """Iterate as Lightning's training loop does."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.utilities import CombinedLoader

    from corpus_client.integrations.lightning import CorpusDataModule

    data = CorpusDataModule(source.url, staging=STAGING, **source.plan)
    data.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    stack.callback(data.teardown, "fit")
    return iter(CombinedLoader(data.train_dataloader()))


def opened_litgpt(source: Source, stack: ExitStack) -> Iterator[object]:
    """Take micro batches as `litgpt pretrain` does, inputs and targets cut out."""
    from lightning import Fabric

    from corpus_client.integrations.litgpt import CorpusData

    data = CorpusData(source.url, NAME, NAME, global_batch_size=ROWS)
    data.connect(batch_size=ROWS, max_seq_length=SEQ_LEN)
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    batches = fabric.setup_dataloaders(data.train_dataloader())
    return (
        tuple(batch[:, columns].contiguous().long() for columns in (slice(0, SEQ_LEN), slice(1, SEQ_LEN + 1)))
        for batch in batches
    )


def opened_torchtitan(source: Source, stack: ExitStack) -> Iterator[object]:
    """Iterate over what torchtitan builds."""
    from corpus_client.integrations.torchtitan import CorpusDataLoader

    options = {"corpus": NAME, "global_batch_size": ROWS, "staging": STAGING}
    loader = CorpusDataLoader.Config(urls=source.url, options=options).build(
        dp_world_size=1, dp_rank=0, seq_len=SEQ_LEN, local_batch_size=ROWS
    )
    stack.callback(loader.close)
    return iter(loader)


def opened_megatron(source: Source, stack: ExitStack) -> Iterator[object]:
    """Iterate over micro batches with masks and positions."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    from corpus_client.integrations.megatron import MegatronLoader

    init_num_microbatches_calculator(0, None, ROWS, ROWS, 1)
    args = SimpleNamespace(micro_batch_size=ROWS, reset_position_ids=False, eod_mask_loss=False)
    return MegatronLoader(bare(source, stack), args, is_training=True)


def opened_jax(source: Source, stack: ExitStack) -> Iterator[object]:
    """Iterate over arrays on a device; the tokens are there when a batch is counted."""
    import jax

    from corpus_client.integrations.jax import device_batches

    sharding = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    batches = device_batches(bare_arrays(source, stack), sharding)
    return (jax.block_until_ready(tuple(batch)) for batch in batches)


MEASURED: dict[str, Measured] = {
    "CorpusLoader": Measured(distribution="corpus-client", open=opened_loader),
    "nanoGPT": Measured(distribution="torch", open=opened_nanogpt),
    "llm.c": Measured(distribution="torch", open=opened_llmc),
    "accelerate": Measured(distribution="accelerate", open=opened_accelerate),
    "HF Trainer": Measured(distribution="transformers", open=opened_trainer),
    "Lightning": Measured(distribution="lightning", open=opened_lightning),
    "litgpt": Measured(distribution="litgpt", open=opened_litgpt),
    "torchtitan": Measured(distribution="torchtitan", open=opened_torchtitan),
    "Megatron-LM": Measured(distribution="megatron-core", open=opened_megatron),
    "DataLoader": Measured(distribution="torch", open=opened_data_loader, baseline="DataLoader"),
    "StatefulDataLoader": Measured(distribution="torchdata", open=opened_stateful, baseline="DataLoader"),
    "ArrayLoader": Measured(distribution="corpus-client", open=opened_array_loader, baseline="ArrayLoader"),
    "JAX": Measured(distribution="jax", open=opened_jax, baseline="ArrayLoader"),
}
