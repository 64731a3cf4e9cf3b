"""Train a small Llama with Hugging Face's Trainer on the batches of a corpus-server: a whole script to copy.

    pip install transformers accelerate
    python hf_trainer.py http://data:8000 --corpus web-train --eval-corpus web-val --vocab-size 50304
    torchrun --standalone --nproc-per-node=8 hf_trainer.py ...        # the same batches on eight GPUs

The same command with more `--steps` goes on from the last checkpoint in `--out`, with the next batch.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from corpus_client import CorpusIterableDataset
from corpus_client.integrations.transformers import train_from


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama with Hugging Face's Trainer.")
    parser.add_argument("url", help="of the server")
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--eval-corpus", required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--seq-len", type=int, default=256, help="tokens that the model sees of a row")
    parser.add_argument("--global-batch-size", type=int, default=16, help="rows of a step over all ranks")
    parser.add_argument("--eval-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--save-every", type=int, default=100, help="steps between checkpoints and evaluations"
    )
    parser.add_argument("--out", default="hf-trained", help="folder of the checkpoints")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=args.seq_len,
    )
    arguments = TrainingArguments(
        args.out,
        max_steps=args.steps,
        learning_rate=1e-3,
        logging_steps=10,
        save_steps=args.save_every,
        eval_strategy="steps",
        eval_steps=args.save_every,
        report_to=[],
    )
    # A model of transformers shifts the labels itself: it sees a whole row, the last target included.
    rows = {"seq_len": args.seq_len - 1, "global_batch_size": args.global_batch_size}
    # After TrainingArguments, which set up the ranks. Every evaluation has the same batches.
    held_out = CorpusIterableDataset(args.url, corpus=args.eval_corpus, num_steps=args.eval_batches, **rows)
    trainer = Trainer(LlamaForCausalLM(config), arguments, eval_dataset=held_out)
    train_from(trainer, args.url, corpus=args.corpus, seed=1337, run="hf-trainer", **rows)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out))
    trainer.save_model()


if __name__ == "__main__":
    main()
