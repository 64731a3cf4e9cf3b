"""Which documents help to predict a text? Train a model many times, each without other documents.

    python leave_out.py http://data:8000 --corpus web --text val:0 --vocab-size 50304 --members 10

Each run is a member of a family of plans: the server leaves out documents that a key chooses, half of them
unless `--leave-out` says otherwise. A document's score is the mean loss on the text of the members that left
it out, less that of the members that trained on it: above 0, it helped. Members start from the same weights,
so that their data alone tell them apart. `--losses` keeps their losses, and a second call goes on there.

Few members say little. With ten, hundreds of documents are left out by the same members as one that matters,
and the highest of a thousand scores is high by chance. So the losses are dealt to the members anew, many
times: the last line says which highest score comes about without any effect.
"""

import argparse
import json
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import torch
from torch import Tensor

from corpus_client import CorpusLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.train import GPT, make_optimizer

SHUFFLES = 1000


def ask(url: str, path: str, **query: Any) -> Any:
    with urllib.request.urlopen(f"{url}{path}?{urlencode(query)}") as response:
        return json.load(response)


def train_member(args: argparse.Namespace, member: int, text: Tensor) -> float:
    """Train a member, and return its loss on the text."""
    torch.manual_seed(args.seed)
    sizes = {"layers": args.layers, "heads": args.heads, "width": args.width}
    model = GPT(vocab_size=args.vocab_size, seq_len=args.seq_len, **sizes)
    optimizer = make_optimizer(model, args.learning_rate)
    with CorpusLoader(
        args.url, plan=plan_of(args, member), num_steps=args.steps, ignore_index=-100
    ) as loader:
        for batch in loader:
            model.to(batch.inputs.device)
            model(batch.inputs, batch.targets).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            its = text.to(batch.inputs.device)[None]
            return float(model(its[:, :-1], its[:, 1:]).mean())


def plan_of(args: argparse.Namespace, member: int) -> dict[str, Any]:
    return {
        "seq_len": args.seq_len,
        "rows": "documents",  # windows of several documents would be left out with any of these
        "family": {"seed": args.seed, "leave_out": args.leave_out, "member": member},
        "stages": [{"global_batch_size": args.global_batch_size, "mixture": {args.corpus: 1}}],
    }


def groups_of(args: argparse.Namespace, documents: list[int]) -> Tensor:
    """Which members left each document out, and which trained on it: `(2, documents, members)` of 0 and 1."""
    with CorpusLoader(args.url, plan=plan_of(args, 0), num_steps=1) as loader:
        path = f"/v1/plans/{loader.plan_id}/members"
    groups = torch.zeros(2, len(documents), args.members)
    for number, document in enumerate(documents):
        for each in ask(args.url, path, document=document, count=args.members, limit=1)["members"]:
            groups[0, number, each["member"]] = each["leaves_out"]
            # One that the run ended before it came is in neither group.
            groups[1, number, each["member"]] = bool(each["steps"]) and each["steps"][0] < args.steps
    return groups


def scores_of(groups: Tensor, losses: Tensor) -> Tensor:
    """Mean losses without each document less those with it, `(documents, k)`, of losses `(members, k)`."""
    without, with_it = (groups @ losses) / groups.sum(2, keepdim=True)
    scores: Tensor = without - with_it
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description="Score documents by what a text loses without them.")
    parser.add_argument("url", metavar="URL")
    parser.add_argument("--corpus", required=True, help="to train on; it needs a document index")
    parser.add_argument("--text", required=True, metavar="CORPUS:DOCUMENT", help="the text to predict")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--members", type=int, default=10)
    parser.add_argument("--leave-out", type=float, default=0.5, help="share of the documents")
    parser.add_argument("--documents", type=int, default=1000, help="score so many, evenly spread")
    parser.add_argument(
        "--least", type=int, default=2, help="members with and without a document to score it"
    )
    parser.add_argument("--losses", type=Path, default=Path("losses.json"))
    parser.add_argument("--seed", type=int, default=7, help="of the family and of the first weights")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--global-batch-size", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    args = parser.parse_args()
    corpus, _, number = args.text.rpartition(":")
    tokens = ask(args.url, f"/v1/corpora/{corpus}/documents/{number}", format="json")["tokens"]
    text = torch.tensor(tokens[: args.seq_len + 1])
    kept = json.loads(args.losses.read_text()) if args.losses.exists() else {}
    settings = {
        name: value for name, value in vars(args).items() if name in ("corpus", "text", "steps", "seed")
    }
    if kept.setdefault("settings", settings) != settings:
        raise SystemExit(
            f"{args.losses} is of another run, {kept['settings']}: name another file with --losses"
        )
    for member in range(args.members):
        if str(member) not in kept:
            kept[str(member)] = train_member(args, member, text)
            args.losses.write_text(json.dumps(kept))
        print(f"member {member}: loss {kept[str(member)]:.4f} on {args.text}", flush=True)
    losses = torch.tensor([kept[str(member)] for member in range(args.members)])
    num_documents = ask(args.url, f"/v1/corpora/{args.corpus}")["num_documents"]
    documents = [*range(0, num_documents, max(1, num_documents // args.documents))][: args.documents]
    groups = groups_of(args, documents)
    which = torch.nonzero((groups.sum(2) >= args.least).all(0)).flatten()
    if not len(which):
        raise SystemExit(
            f"no document was left out by, and shown to, {args.least} members: train more of them"
        )
    groups = groups[:, which]
    scores = scores_of(groups, losses[:, None])[:, 0]
    shuffled = torch.stack([losses[torch.randperm(args.members)] for _ in range(SHUFFLES)], 1)
    chance = scores_of(groups, shuffled).max(0).values
    for at in scores.argsort(descending=True)[:10].tolist():
        share = float((chance >= scores[at] - 1e-6).float().mean())
        print(
            f"document {documents[which[at]]}: loss {scores[at]:+.4f} without it, "
            f"as high by chance in {share:.0%} of shuffles"
        )
    median, high = chance.quantile(torch.tensor([0.5, 0.95])).tolist()
    print(
        f"{len(which)} documents were scored with {args.members} members. Without any effect the highest "
        f"score is at least {median:.4f} in half of the cases, and {high:.4f} in one of 20"
    )


if __name__ == "__main__":
    main()
