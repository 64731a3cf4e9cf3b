"""Training from a corpus server: a loader, a model, a loop."""

import contextlib
import dataclasses
import itertools
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from torch import Tensor

from corpus_client import Batch, CorpusLoader

from .model import GPT, ModelConfig, cosine_learning_rate

PRINTED_LINES = 12  # over a whole run
VALIDATION_STEPS = 8


class CheckpointMismatch(Exception):
    """A checkpoint of another model cannot be continued."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What is trained on what; everything that makes two runs the same run."""

    corpus: str
    model: ModelConfig
    global_batch_size: int
    learning_rate: float
    seed: int = 1337

    @classmethod
    def for_device(cls, device: torch.device, *, corpus: str, vocab_size: int) -> "Recipe":
        """Sizes with which a minute shows progress: on two cores, or on a GPU."""
        if device.type == "cuda":
            model = ModelConfig(vocab_size=vocab_size, seq_len=512, num_layers=8, num_heads=8, width=512)
            return cls(corpus=corpus, model=model, global_batch_size=64, learning_rate=1e-3)
        # Few tokens a step: on a CPU, many small steps learn more in a minute than few large ones.
        model = ModelConfig(vocab_size=vocab_size, seq_len=128, num_layers=2, num_heads=4, width=192)
        return cls(corpus=corpus, model=model, global_batch_size=4, learning_rate=3e-3)

    @property
    def tokens_per_step(self) -> int:
        """Predictions that one step learns from."""
        return self.global_batch_size * self.model.seq_len


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """When to stop: after so many seconds, or after so many steps of this run if they are given."""

    seconds: float
    steps: int | None = None

    def progress(self, *, elapsed_seconds: float, steps: int) -> float:
        """The part of the run that is done; 1 or more means stop."""
        return elapsed_seconds / self.seconds if self.steps is None else steps / self.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A run so far: `last_loss` is the mean since the line before, `stall_share` the time spent waiting."""

    first_loss: float
    last_loss: float
    next_step: int
    num_steps: int
    tokens_per_second: float
    stall_share: float
    is_complete: bool  # False: a signal ended it early


def choose_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(
    url: str, recipe: Recipe, *, limit: Limit, checkpoint: Path, device: torch.device, console: Console
) -> Report:
    """Train until the limit, from the checkpoint if there is one, and save one at the end.

    The learning rate rises and falls once over each run. Ctrl-C and SIGTERM end it early, with a checkpoint.
    """
    torch.manual_seed(recipe.seed)
    model = GPT(recipe.model).to(device)
    optimizer = model.make_optimizer(recipe.learning_rate)
    with open_loader(url, recipe, device=device) as loader:
        if checkpoint.exists():
            _restore(checkpoint, recipe, model, optimizer, loader)
            console.print(f"going on from {checkpoint} at step {loader.state_dict()['next_step']:,}")
        report = _loop(loader, model, optimizer, recipe, limit=limit, device=device, console=console)
        _save(checkpoint, recipe, model, optimizer, loader)
        return report


def open_loader(url: str, recipe: Recipe, *, device: torch.device, corpus: str | None = None) -> CorpusLoader:
    """The loader of a recipe, or the same over another corpus."""
    return CorpusLoader(
        url,
        corpus=corpus or recipe.corpus,
        seq_len=recipe.model.seq_len,
        global_batch_size=recipe.global_batch_size,
        seed=recipe.seed,
        device=device,
    )


@torch.no_grad()
def validation_loss(
    url: str, recipe: Recipe, *, corpus: str, checkpoint: Path, device: torch.device
) -> float:
    """Mean loss of the saved model over the first windows of another corpus."""
    model = GPT(recipe.model).to(device)
    model.load_state_dict(torch.load(checkpoint, map_location=device, weights_only=True)["model"])
    with open_loader(url, recipe, device=device, corpus=corpus) as loader:
        batches = itertools.islice(loader, VALIDATION_STEPS)
        losses = [float(model(batch.inputs, batch.targets)) for batch in batches]
    return sum(losses) / len(losses)


def _loop(
    loader: CorpusLoader,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    *,
    limit: Limit,
    device: torch.device,
    console: Console,
) -> Report:
    started = time.perf_counter()
    reports: list[Report] = []
    losses: list[Tensor] = []  # since the last report, still on the device
    progress, num_steps = 0.0, 0
    with _live_line(console) as live, _asked_to_stop() as asked_to_stop:
        while progress < 1 and not (reports and asked_to_stop()):
            batch = next(loader)
            learning_rate = cosine_learning_rate(progress, peak=recipe.learning_rate)
            losses.append(_train_step(model, optimizer, batch, learning_rate, device))
            num_steps += 1
            elapsed = time.perf_counter() - started
            progress = limit.progress(elapsed_seconds=elapsed, steps=num_steps)
            if progress >= min(1, len(reports) / PRINTED_LINES):  # seldom: reading a loss waits for the GPU
                loss = torch.stack(losses).mean().item()
                losses.clear()
                report = Report(
                    first_loss=reports[0].first_loss if reports else loss,
                    last_loss=loss,
                    next_step=loader.step,
                    num_steps=num_steps,
                    tokens_per_second=num_steps * recipe.tokens_per_step / elapsed,
                    stall_share=loader.stats().wait_seconds / elapsed,
                    is_complete=progress >= 1,
                )
                reports.append(report)
                console.print(_line(batch.step, report))
            live(progress, batch.step)
    return dataclasses.replace(reports[-1], next_step=loader.step, num_steps=num_steps)


def _train_step(
    model: GPT, optimizer: torch.optim.Optimizer, batch: Batch, learning_rate: float, device: torch.device
) -> Tensor:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        loss: Tensor = model(batch.inputs, batch.targets)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def _line(step: int, report: Report) -> str:
    return (
        f"step {step:>7,}   loss {report.last_loss:6.3f}   {report.tokens_per_second:>11,.0f} tokens/s   "
        f"data stall {report.stall_share:6.2%}"
    )


@contextlib.contextmanager
def _live_line(console: Console) -> Iterator[Callable[[float, int], None]]:
    """A bar below the printed lines while there is a terminal to draw it on."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=1.0)
        yield lambda progress, step: bar.update(task, completed=progress, description=f"step {step:,}")


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C or SIGTERM waits for the step in hand, so that model and data agree."""
    asked = False

    def ask(signal_number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _save(
    path: Path, recipe: Recipe, model: GPT, optimizer: torch.optim.Optimizer, loader: CorpusLoader
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": loader.state_dict()}
    torch.save({"sizes": dataclasses.asdict(recipe.model), **state}, partial)
    partial.replace(path)


def _restore(
    path: Path, recipe: Recipe, model: GPT, optimizer: torch.optim.Optimizer, loader: CorpusLoader
) -> None:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    sizes = dataclasses.asdict(recipe.model)
    if state["sizes"] != sizes:
        raise CheckpointMismatch(f"{path} holds a model of {state['sizes']}, this one is {sizes}; remove it")
    loader.load_state_dict(state["data"])  # refuses another plan, corpus or seed by name
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
