"""Let the mixture follow the losses: a controller, and a small training run around it.

    torchrun --standalone --nproc-per-node=2 online_mixing.py http://data:8000 --corpora web code ...

Every `--every` steps rank 0 looks at the losses of the sources and decides on weights, which hold `--ahead`
steps later: behind all that any rank has asked for ahead. It broadcasts them, and every rank extends its
loader alike. The checkpoint holds the decisions: after a SIGKILL the same command goes on where it was.
With `--plan FILE`, the plan of another run, it replays that one's decisions first.
"""

import argparse
import json
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from corpus_client import CorpusLoader, Staging


class Controller:
    """Decides on mixtures; `after` is called by every rank after every step."""

    def __init__(self, loader: CorpusLoader, every: int, ahead: int) -> None:
        self.loader, self.every, self.ahead = loader, every, ahead
        self.losses: dict[str, float] = {}  # the last that are known, for the checkpoint

    def after(self, step: int) -> None:
        at_step = step + 1 + self.ahead
        if (step + 1) % self.every or at_step <= (self.loader.last_stage_step or 0):
            return  # not now, or it was decided before the run was resumed
        decision = [self.decide() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(decision)
        self.loader.extend(mixture=decision[0], at_step=at_step)

    def decide(self, smallest: float = 0.05) -> dict[str, float]:
        """More of what is learned worse, and of each source at least a small share."""
        self.losses |= {name: loss.mean for name, loss in self.loader.stats().losses.items()}
        high = max(self.losses.values())
        worth = {name: math.exp(self.losses.get(name, high) - high) for name in self.loader.sources}
        return {name: smallest + each / sum(worth.values()) for name, each in worth.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model on a mixture that follows its losses.")
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--corpora", nargs="+", required=True, help="to mix; evenly at first")
    parser.add_argument("--plan", type=Path, help="a plan whose decisions are replayed first, as a file")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--global-batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50, help="steps between decisions")
    parser.add_argument("--ahead", type=int, default=64, help="steps from a decision until it holds")
    parser.add_argument("--checkpoint", type=Path, default=Path("mixing.pt"))
    parser.add_argument("--save-every", type=int, default=100)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    first = {"global_batch_size": args.global_batch_size, "mixture": dict.fromkeys(args.corpora, 1)}
    plan = json.loads(args.plan.read_text()) if args.plan else {"seq_len": args.seq_len, "stages": [first]}
    saved = torch.load(args.checkpoint) if args.checkpoint.exists() else None
    # With tokens of two bytes half of `--ahead` steps: no rank asks for a step that is still undecided.
    ahead_bytes = args.ahead * args.global_batch_size // dist.get_world_size() * (args.seq_len + 1)
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    loader = CorpusLoader(
        args.urls,
        plan=saved["data"]["plan"] if saved else plan,
        num_steps=args.steps,
        sources=True,
        device=device,
        staging=Staging(prefetch_bytes=ahead_bytes),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(args.vocab_size, 64), nn.GELU(), nn.Linear(64, args.vocab_size))
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=1e-2)
    controller = Controller(loader, args.every, args.ahead)
    if saved:
        loader.load_state_dict(saved["data"])
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        controller.losses = saved["losses"]
    parallel = DistributedDataParallel(model)
    for batch in loader:
        logits = parallel(batch.inputs).transpose(1, 2)
        by_row = F.cross_entropy(logits, batch.targets, reduction="none").mean(1)
        by_row.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        loader.record(batch.step, by_row.detach())
        controller.after(batch.step)
        done = batch.step + 1
        if dist.get_rank() == 0 and (done % args.every == 0 or done == args.steps):
            known = "  ".join(f"{name} {loss:.3f}" for name, loss in controller.losses.items())
            print(f"step {batch.step:>6,}  loss {by_row.mean().item():.4f}   {known}", flush=True)
        if dist.get_rank() == 0 and (done % args.save_every == 0 or done == args.steps):
            state = {"data": loader.state_dict(), "model": model.state_dict(), "losses": controller.losses}
            partial = args.checkpoint.with_suffix(".partial")
            torch.save({**state, "optimizer": optimizer.state_dict()}, partial)
            partial.replace(args.checkpoint)
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
