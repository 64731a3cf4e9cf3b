"""Train a small GPT with Lightning on the batches of a corpus-server: a whole script to copy.

    pip install lightning
    python lightning_trainer.py http://data:8000 --corpus web-train --eval-corpus web-val --vocab-size 50304

On several GPUs Lightning starts a process for each, and each gets its own rows. The same command with more
`--steps` goes on from the last checkpoint in `--out`, with the next batch.
"""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from corpus_client import Batch, CorpusIterableDataset
from corpus_client.integrations.lightning import CorpusDataModule


class Data(CorpusDataModule):
    """Training batches of one corpus, and the same few batches of another for each validation."""

    def __init__(self, url: str, eval_corpus: str, eval_batches: int, **options: Any) -> None:
        super().__init__(url, **options)
        del options["corpus"], options["run"]
        self.held_out = {**options, "corpus": eval_corpus, "num_steps": eval_batches}
        self.url = url

    def val_dataloader(self) -> Any:
        return DataLoader(CorpusIterableDataset(self.url, **self.held_out), batch_size=None)


class GPT(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, vocab_size: int, seq_len: int, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(seq_len, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab_size)

    def loss(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        causal = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], device=inputs.device)
        hidden = self.blocks(self.tokens(inputs) + self.positions.weight, mask=causal, is_causal=True)
        return F.cross_entropy(self.head(hidden).transpose(1, 2), targets)

    def training_step(self, batch: Batch, _: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch.inputs), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT with Lightning.")
    parser.add_argument("url", help="of the server")
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--eval-corpus", required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--global-batch-size", type=int, default=16, help="rows of a step over all ranks")
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--save-every", type=int, default=100, help="steps between checkpoints and validations"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("lightning-trained"), help="folder of the checkpoints"
    )
    args = parser.parse_args()

    pl.seed_everything(0)
    data = Data(
        args.url,
        args.eval_corpus,
        args.eval_batches,
        corpus=args.corpus,
        run="lightning",
        seq_len=args.seq_len,
        global_batch_size=args.global_batch_size,
        seed=1337,
    )
    trainer = pl.Trainer(
        max_steps=args.steps,
        # A plan has no end, so Lightning counts steps and no epochs.
        val_check_interval=args.save_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        logger=False,
        callbacks=[ModelCheckpoint(args.out, save_last=True, every_n_train_steps=args.save_every)],
    )
    last = args.out / "last.ckpt"
    trainer.fit(
        GPT(args.vocab_size, args.seq_len), datamodule=data, ckpt_path=last if last.exists() else None
    )
    print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
