"""Record the timeline of a training loop, as its loader's own trace gives it.

    python -m scripts.timeline > scripts/results/DATE-timeline.json

A bigram model trains on the CPU, 64 x 1,024 tokens a step, from a server of the same machine by URL. Kept
are the spans of the last steps.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from corpus_client import CorpusLoader, Staging
from scripts.benchmarks.servers import serving

NUM_STEPS, SHOWN_STEPS = 40, 5
ROWS, SEQ_LEN, VOCABULARY, WIDTH = 64, 1024, 64, 16


def main() -> None:
    """Train, and print the trace."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, VOCABULARY)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        path, trace = Path(folder, "web.bin"), Path(folder, "trace.json")
        np.random.default_rng(0).integers(0, VOCABULARY, 10_000_000, dtype=np.uint16).tofile(path)
        with (
            serving({"web": path}) as server,
            CorpusLoader(
                server.url,
                corpus="web",
                seq_len=SEQ_LEN,
                global_batch_size=ROWS,
                device="cpu",
                staging=Staging(trace_steps=NUM_STEPS, prefetch_bytes=4 * ROWS * (SEQ_LEN + 1) * 2),
            ) as loader,
        ):
            for inputs, targets in loader:
                loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                if loader.step == NUM_STEPS:
                    break
            loader.trace(trace)
        events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    steps = sorted(each["ts"] for each in events if each["name"] == "step")
    first = steps[-SHOWN_STEPS - 1]
    kept = [each for each in events if each["ph"] == "M" or first <= each["ts"] < steps[-1]]
    for each in kept:
        if each["ph"] == "X":
            each["ts"], each["dur"] = round(each["ts"] - first, 1), round(each["dur"], 1)
    machine = {"cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "torch": torch.__version__}
    measured = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m scripts.timeline",
        "machine": machine,
    }
    json.dump({**measured, "traceEvents": kept}, sys.stdout, indent=1)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
