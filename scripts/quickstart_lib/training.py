"""The training example, in a process of its own."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "client" / "examples" / "train.py"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The example's flags with which a minute shows progress."""

    seq_len: int
    global_batch_size: int
    layers: int
    heads: int
    width: int
    learning_rate: float
    log_every: int
    seed: int = 1337

    @classmethod
    def for_device(cls, device: str) -> "Recipe":
        """Sizes for two cores, or for a GPU."""
        if device == "cuda":
            return cls(
                seq_len=512,
                global_batch_size=64,
                layers=8,
                heads=8,
                width=512,
                learning_rate=1e-3,
                log_every=200,
            )
        # Few tokens a step: on a CPU, many small steps learn more in a minute than few large ones.
        return cls(
            seq_len=128, global_batch_size=4, layers=2, heads=4, width=192, learning_rate=3e-3, log_every=100
        )

    def flags(self) -> list[str]:
        """As the example takes them."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return [
            part for name, value in fields.items() for part in ("--" + name.replace("_", "-"), str(value))
        ]


def command(url: str, recipe: Recipe, *flags: str) -> list[str]:
    """What a person would type to train with the example on this machine."""
    return [os.path.relpath(sys.executable), os.path.relpath(EXAMPLE), url, *recipe.flags(), *flags]


def run(command: list[str]) -> int:
    """Run it to its end, and return its exit code; Ctrl-C and SIGTERM let it save a checkpoint first.

    It gets a session of its own, so that it is told once.
    """
    with subprocess.Popen(command, start_new_session=True) as process:
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, lambda *_: process.terminate()) for number in numbers}
        try:
            return process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
