"""The training example, in a process of its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

EXAMPLE = Path(__file__).parents[2] / "client" / "examples" / "train.py"

PLAN = {
    "cuda": {"seq_len": 512, "global_batch_size": 64, "seed": 1337},
    # Few tokens a step: on a CPU, many small steps learn more in a minute than few large ones.
    "cpu": {"seq_len": 128, "global_batch_size": 4, "seed": 1337},
}
MODEL = {
    "cuda": {"layers": 8, "heads": 8, "width": 512, "learning_rate": 1e-3, "log_every": 200},
    "cpu": {"layers": 2, "heads": 4, "width": 192, "learning_rate": 3e-3, "log_every": 100},
}
"""The example's flags with which a minute shows progress, on a GPU or on two cores."""


def command(url: str, device: str, *flags: str) -> list[str]:
    """What a person would type to train with the example on this machine."""
    words = [os.path.relpath(sys.executable), os.path.relpath(EXAMPLE), url]
    for name, value in {**PLAN[device], **MODEL[device]}.items():
        words += ["--" + name.replace("_", "-"), str(value)]
    return [*words, *flags]


def run(command: list[str]) -> int:
    """Run it to its end, and return its exit code; Ctrl-C and SIGTERM let it save a checkpoint first.

    It gets a session of its own, so that it is told once. One that is only starting is ended, too: an
    exception inside `Popen` would leave it behind.
    """
    told: list[int] = []
    started: list[subprocess.Popen[bytes]] = []

    def tell(number: int, _: FrameType | None) -> None:
        told.append(number)
        for process in started:
            process.terminate()

    before = {number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with subprocess.Popen(command, start_new_session=True) as process:
            started.append(process)
            if told:
                process.terminate()
            return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
