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

from corpus_client import CorpusLoader

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
        model = ModelConfig(vocab_size=vocab_size, seq_len=128, num_layers=4, num_heads=4, width=128)
        return cls(corpus=corpus, model=model, global_batch_size=16, learning_rate=3e-3)

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


@dataclass(kw_only=True, slots=True)
class Meter:
    """Where the time of this run went."""

    tokens_per_step: int
    started: float = dataclasses.field(default_factory=time.perf_counter)
    num_steps: int = 0
    stalled_seconds: float = 0.0

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Counts the time inside as a stall: the model had nothing to do."""
        began = time.perf_counter()
        yield
        self.stalled_seconds += time.perf_counter() - began

    @property
    def elapsed_seconds(self) -> float:
        """Since the first batch was asked for."""
        return time.perf_counter() - self.started

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens over the whole run so far."""
        return self.num_steps * self.tokens_per_step / self.elapsed_seconds

    @property
    def stall_share(self) -> float:
        """Part of the time that the loop waited for data, 0 to 1."""
        return self.stalled_seconds / self.elapsed_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a run achieved."""

    first_loss: float
    last_loss: float
    next_step: int
    num_steps: int
    tokens_per_second: float
    stall_share: float
    is_complete: bool  # False: a signal ended it


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
    meter = Meter(tokens_per_step=recipe.tokens_per_step)
    batches = iter(loader)
    first_loss = last_loss = float("nan")
    with _live_line(console) as live, _asked_to_stop() as asked_to_stop:
        progress, next_line = 0.0, 0.0
        while progress < 1 and not asked_to_stop():
            with meter.waiting_for_data():
                batch = next(batches)
            for group in optimizer.param_groups:
                group["lr"] = cosine_learning_rate(progress, peak=recipe.learning_rate)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(batch.inputs, batch.targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            meter.num_steps += 1
            progress = limit.progress(elapsed_seconds=meter.elapsed_seconds, steps=meter.num_steps)
            if progress >= min(next_line, 1):  # seldom, because reading the loss waits for the GPU
                last_loss = loss.item()
                first_loss = last_loss if meter.num_steps == 1 else first_loss
                console.print(_line(batch.step, last_loss, meter))
                next_line += 1 / PRINTED_LINES
            live(progress, batch.step)
    return Report(
        first_loss=first_loss,
        last_loss=last_loss,
        next_step=loader.state_dict()["next_step"],
        num_steps=meter.num_steps,
        tokens_per_second=meter.tokens_per_second,
        stall_share=meter.stall_share,
        is_complete=progress >= 1,
    )


def _line(step: int, loss: float, meter: Meter) -> str:
    return (
        f"step {step:>7,}   loss {loss:6.3f}   {meter.tokens_per_second:>11,.0f} tokens/s   "
        f"data stall {meter.stall_share:6.2%}"
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
