"""Train a small GPT from a corpus server: one file to read, run and copy from.

    python train.py http://data:8000 --corpus web --vocab-size 50304                     # one device
    torchrun --standalone --nproc-per-node=8 train.py http://data:8000 --corpus web ...  # a process per GPU

Stop it (Ctrl-C, SIGTERM, SIGKILL) and run it again, on as many ranks as you like: it goes on from the
checkpoint, which all ranks must see, with the very batch that comes next. --help has the rest.
"""

import argparse
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as recomputed

from corpus_client import Batch, CorpusClientError, CorpusLoader, Network

MODEL_DEFAULTS = {"layers": 4, "heads": 4, "width": 256}
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
NO_DATA_PARALLEL = """\
torch.nn.DataParallel is refused. It drives all GPUs from one process: its threads share one interpreter
lock, the whole batch goes to the first GPU and is scattered from there, parameters are copied to every GPU
in every forward pass, and outputs and gradients come together on the first GPU, which is the first to run
out of memory. One process per GPU has none of that, and each receives its own rows only:
    torchrun --standalone --nproc-per-node=NUM_GPUS train.py ..."""


class GPT(nn.Module):
    """Decoder-only, of torch's own layers; learned positions, tied embeddings, initialised as GPT-2.

    recompute: keep no activations inside layers but compute them again in the backward pass.
    """

    def __init__(
        self, *, vocab_size: int, seq_len: int, layers: int, heads: int, width: int, recompute: bool = False
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(seq_len, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True, bias=False
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:  # what writes into the residual starts smaller, the deeper the network
                into_residual = name.endswith(("out_proj.weight", "linear2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers if into_residual else 1))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of each row, in nats: `(rows,)`.

        inputs, targets: `(rows, length) int64`, length at most seq_len.
        """
        length = inputs.shape[1]
        positions = torch.arange(length, device=inputs.device)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=inputs.device)
        hidden = self.token_embedding(inputs) + self.position_embedding(positions)
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                hidden = recomputed(layer, hidden, mask, is_causal=True, use_reentrant=False)
            else:
                hidden = layer(hidden, mask, is_causal=True)
        logits = F.linear(self.norm(hidden), self.token_embedding.weight)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(1)


def make_optimizer(model: GPT, learning_rate: float) -> torch.optim.AdamW:
    """AdamW that decays matrices only; norms are left alone."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def learning_rate_at(step: int, args: argparse.Namespace) -> float:
    """Rise over the warm-up, then fall along a cosine to a tenth at the last step; from the step alone."""
    peak, warmup = float(args.learning_rate), int(args.warmup_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, args.steps - warmup))
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


class Trainer:
    """Everything that a step changes, and nothing else; `world_size` processes hold the same."""

    def __init__(self, args: argparse.Namespace, device: torch.device, rank: int, world_size: int) -> None:
        self.args, self.device, self.rank, self.world_size = args, device, rank, world_size
        self.sizes = {name: getattr(args, name) for name in ("vocab_size", "seq_len", *MODEL_DEFAULTS)}
        torch.manual_seed(args.seed)
        self.model = GPT(**self.sizes, recompute=args.recompute).to(device)
        self.optimizer = make_optimizer(self.model, args.learning_rate)
        # float16 cannot hold small gradients, so the loss is scaled up for them. Disabled, it does nothing.
        self.scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
        self.parallel: nn.Module = self.model
        if world_size > 1:
            self.parallel = DistributedDataParallel(
                self.model, device_ids=[device.index] if device.type == "cuda" else None
            )

    def open_loader(self, corpus: str, **changes: Any) -> CorpusLoader:
        """This rank's rows of each global batch; rank and world size come from torch.distributed."""
        shape = {"seq_len": self.args.seq_len, "global_batch_size": self.args.global_batch_size}
        network = Network(auth=self.args.token_file, reach_seconds=self.args.reach_seconds)
        loader = CorpusLoader(
            self.args.urls,
            corpus=corpus,
            **shape,
            run=self.args.run_name,
            device=self.device,
            network=network,
            **changes,
        )
        loader.check_vocab_size(self.args.vocab_size)  # else torch fails in mid-run, without the reason
        return loader

    def open_eval_loader(self) -> CorpusLoader:
        return self.open_loader(self.args.eval_corpus, order="sequential", num_steps=self.args.eval_steps)

    def train_step(self, batch: Batch) -> Tensor:
        """One update from this rank's batch; returns the loss of each row, still on the device.

        The rank batch is cut into `--accumulate` micro batches of equally many rows, so that the mean of
        their losses is the batch's. Gradients add up in place; ranks exchange them once, in the last one.
        """
        args = self.args
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(batch.step, args)
        row_losses: list[Tensor] = []
        micro_batches = zip(
            *(half.chunk(args.accumulate) for half in (batch.inputs, batch.targets)), strict=True
        )
        for number, (inputs, targets) in enumerate(micro_batches, start=1):
            with self.exchange(now=number == args.accumulate):
                with self.autocast():
                    losses = self.parallel(inputs, targets)
                self.scaler.scale(losses.mean() / args.accumulate).backward()
            row_losses.append(losses.detach())
        self.scaler.unscale_(self.optimizer)  # so that clipping sees the gradients themselves
        nn.utils.clip_grad_norm_(self.model.parameters(), args.clip)
        self.scaler.step(self.optimizer)  # leaves the step out where float16 overflowed
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.cat(row_losses)

    @torch.no_grad()
    def evaluate(self, loader: CorpusLoader) -> float:
        """Mean loss on the other corpus, from its first step on: every time of the same batches."""
        loader.seek(0)
        with self.autocast():
            losses = [self.model(inputs, targets).float() for inputs, targets in loader]
        return self.mean(torch.cat(losses).mean()).item()

    def mean(self, value: Tensor) -> Tensor:
        """Over the ranks."""
        if self.world_size > 1:
            dist.all_reduce(value)
        return value / self.world_size

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        dtype = AUTOCAST[self.args.precision]
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def exchange(self, *, now: bool) -> contextlib.AbstractContextManager[Any]:
        """Whether this backward pass averages gradients over the ranks, or only adds to its own."""
        if now or not isinstance(self.parallel, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.parallel.no_sync()

    def save(self, data: dict[str, Any]) -> None:
        """One file for all ranks, there whole or not at all. data: the state after the last batch."""
        if self.rank > 0:
            return
        state = {
            "sizes": self.sizes,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "data": data,  # the same on every rank
        }
        partial = self.args.checkpoint.with_name(self.args.checkpoint.name + ".partial")
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())  # the new name must not reach the disk before the content
        partial.replace(self.args.checkpoint)

    def restore(self, loader: CorpusLoader) -> None:
        """Go on where the checkpoint was made, on this many ranks."""
        path = self.args.checkpoint
        state = torch.load(path, map_location=self.device, weights_only=True)
        if state["sizes"] != self.sizes:
            raise SystemExit(f"{path} holds a model of {state['sizes']}, this is {self.sizes}")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        loader.load_state_dict(state["data"])  # refuses another plan, seed or corpus, naming the difference


def run(trainer: Trainer) -> int:
    """Train up to `--steps`, for `--seconds`, or until a signal; evaluate and save on the way.

    Returns:
        The exit code: 0, or 128 + the signal that stopped the run.
    """
    args, loaders = trainer.args, list[CorpusLoader]()
    signals = catch_signals(loaders)
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        recording = {"sources": args.record is not None, "record_dir": args.record}
        loader = stack.enter_context(
            trainer.open_loader(args.corpus, seed=args.seed, num_steps=args.steps, **recording)
        )
        if args.eval_corpus:  # a wrong name shows now, and not at the first evaluation
            eval_loader = stack.enter_context(trainer.open_eval_loader())
            loaders.append(eval_loader)
        if args.checkpoint.exists():
            trainer.restore(loader)
            trainer.say(f"going on from {args.checkpoint} at step {loader.step:,}")
            if loader.step >= args.steps:
                trainer.say(
                    f"nothing is left: a larger --steps goes on, and without {args.checkpoint} it begins anew"
                )
        stack.enter_context(save_if_waiting(trainer, loader))
        loaders.append(loader)
        first_step, started, stopped = loader.step, time.perf_counter(), False
        log = Log(trainer, loader)
        for batch in loader:
            losses = trainer.train_step(batch)
            if args.record is not None:
                loader.record(batch.step, losses)
            log.losses.append(losses.mean())
            done = loader.step
            is_last = done == args.steps
            wishes = bool(signals), time.perf_counter() - started > args.seconds
            is_alone = trainer.world_size == 1  # others have to be asked
            if is_last or done % args.log_every == 0 or done == first_step + 1 or (is_alone and any(wishes)):
                line, (stopped, time_is_up) = log.report(*wishes)
                is_last = is_last or time_is_up
                trainer.say(f"step {batch.step:>7,}   {line}")
            if is_last or stopped or done % args.save_every == 0:
                trainer.save(batch.state_after())
            if args.eval_corpus and not stopped and (is_last or done % args.eval_every == 0):
                trainer.say(
                    f"step {batch.step:>7,}   loss {trainer.evaluate(eval_loader):8.4f} on {args.eval_corpus}"
                )
            if is_last or stopped:
                break
        end = "complete" if loader.step >= args.steps else "stopped"
        trainer.say(f"{end}: the next step is {loader.step:,}, the checkpoint {args.checkpoint}")
    return 128 + signals[0] if stopped and signals else 0


class Log:
    """What happened since the last line."""

    def __init__(self, trainer: Trainer, loader: CorpusLoader) -> None:
        self.trainer, self.loader = trainer, loader
        self.losses: list[Tensor] = []  # still on the device: reading one waits for it
        self.marked, self.waited = time.perf_counter(), 0.0

    def report(self, *wishes: bool) -> tuple[str, list[bool]]:
        """A line for the log, and of each wish whether any rank has it: so all stop after the same step."""
        args = self.trainer.args
        loss = torch.stack(self.losses).mean()
        together = torch.stack([loss, *(torch.full_like(loss, float(wish)) for wish in wishes)])
        mean_loss, *shares = self.trainer.mean(together).tolist()
        now, waited = time.perf_counter(), self.loader.stats().wait_seconds
        seconds, wait_seconds = now - self.marked, waited - self.waited
        tokens_per_second = len(self.losses) * args.global_batch_size * args.seq_len / seconds
        self.losses, self.marked, self.waited = [], now, waited
        line = (
            f"loss {mean_loss:8.4f} {tokens_per_second:>11,.0f} tokens/s   "
            f"{wait_seconds / seconds:6.2%} waiting for data"
        )
        return line, [share > 0 for share in shares]


def out_of_memory_advice(args: argparse.Namespace, world_size: int) -> str:
    """Which flag to change so that a step fits; the batches that are trained on stay the same."""
    rows = args.global_batch_size // world_size
    micro = rows // args.accumulate
    again = f"out of memory with micro batches of {micro} rows; run it again with the same flags, but"
    then = f"the global batches stay the same, and {args.checkpoint} is gone on from"
    finer = next((n for n in divisors(rows) if n >= 2 * args.accumulate), None)
    if finer is not None:
        return (
            f"{again} --accumulate {finer} (it was {args.accumulate}): {rows // finer} rows at a time; {then}"
        )
    if args.precision == "fp32":
        return f"{again} --precision bf16; {then}"
    if not args.recompute:
        return f"{again} --recompute, which keeps fewer activations; {then}"
    return f"{again} a smaller --seq-len, --width or --layers, from a new --checkpoint: nothing else is left"


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def catch_signals(loaders: list[CorpusLoader]) -> list[int]:
    """Ctrl-C and SIGTERM are put here, to stop after a whole step with a checkpoint; a second Ctrl-C ends.

    A loop that waits for a server stops at once: the step may never come. loaders: empty until they are made.
    """
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if not loaders or any(loader.waiting for loader in loaders):
            raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    return caught


@contextlib.contextmanager
def save_if_waiting(trainer: Trainer, loader: CorpusLoader) -> Iterator[None]:
    """Save a checkpoint when a signal ends the wait for a batch: every batch yielded was trained on."""
    first_step = loader.step
    try:
        yield
    except SystemExit:
        if loader.step > first_step:
            trainer.save(loader.state_dict())
        trainer.say(f"stopped while waiting: the next step is {loader.step:,}")
        raise


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT from a corpus server.")
    add = parser.add_argument
    add("urls", nargs="+", metavar="URL", help="of the server, or of several replicas")
    add("--token-file", type=Path, help="file with the access token, for servers that ask for one")
    add("--reach-seconds", type=float, help="for a server that is still starting; default 30, on this host 5")
    add("--run-name", help="name of the run, by which the server's page groups what it asks for")
    add("--corpus", required=True, help="name of the corpus to train on")
    add("--eval-corpus", help="name of a corpus to evaluate on")
    add("--vocab-size", type=int, required=True, help="largest token id + 1, or more")
    add("--seq-len", type=int, default=256)
    add("--global-batch-size", type=int, default=32, help="rows of a step over all ranks")
    add("--seed", type=int, default=1337, help="of the order of the data and of the first weights")
    for name, size in MODEL_DEFAULTS.items():
        add(f"--{name}", type=int, default=size, help="of the model")
    add("--steps", type=int, default=1000, help="train up to this step")
    add("--seconds", type=float, default=math.inf, help="or for so long")
    add("--learning-rate", type=float, default=1e-3)
    add("--warmup-steps", type=int, default=50)
    add("--clip", type=float, default=1.0, help="bound of the gradients' norm")
    add("--accumulate", type=int, default=1, help="micro batches that a rank's batch is cut into")
    add("--precision", choices=AUTOCAST, help="default: bf16 on a GPU that has it, else fp16; fp32 on a CPU")
    add("--recompute", action="store_true", help="activations in the backward pass: less memory, more time")
    add("--checkpoint", type=Path, default=Path("checkpoint.pt"), help="where to go on from, and to save")
    add("--save-every", type=int, default=100, help="steps")
    add("--log-every", type=int, default=10, help="steps; then ranks agree on stopping, too")
    add("--eval-every", type=int, default=200, help="steps")
    add("--eval-steps", type=int, default=8)
    add("--record", type=Path, metavar="DIR", help="write the loss of each row there, by step and source")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--data-parallel", action="store_true", help="torch.nn.DataParallel; refused, with the reason")
    args = parser.parse_args(arguments)
    if args.data_parallel:
        parser.exit(2, f"train.py: {NO_DATA_PARALLEL}\n")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rows = args.global_batch_size // world_size
    if args.global_batch_size % world_size:
        parser.error(f"--global-batch-size {args.global_batch_size} does not divide over {world_size} ranks")
    if args.accumulate not in divisors(rows):
        parser.error(f"--accumulate must be one of {divisors(rows)}, the divisors of a rank's {rows} rows")
    if args.width % args.heads:
        parser.error(f"--width must be divisible by --heads, got {args.width} and {args.heads}")
    if args.precision is None and args.device.startswith("cuda"):
        args.precision = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    args.precision = args.precision or "fp32"
    try:
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {args.device} is none that torch sees here: {str(error).splitlines()[0]}")
    return args


def main() -> int:
    args = parse_arguments()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index or 0)))
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        exit_code = run(Trainer(args, device, rank, world_size))
    except torch.cuda.OutOfMemoryError as error:
        raise SystemExit(
            f"train.py: rank {rank}: {out_of_memory_advice(args, world_size)}\n{error}"
        ) from error
    except CorpusClientError as error:
        raise SystemExit(f"train.py: rank {rank}: {type(error).__name__}: {error}") from error
    if world_size > 1:
        dist.destroy_process_group()
        # DistributedDataParallel keeps gloo's threads alive. If one of them drops a tensor while the
        # interpreter ends, the process aborts: "terminate called without an active exception".
        sys.stdout.flush()
        os._exit(exit_code)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
