"""The tour: corpus, server, training, and what to try next."""

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

from rich.console import Console

from scripts.processes import HOST, ServerFailed, claim_port, get, is_ready, running

from . import text, training

HOME = Path(".cache/quickstart")  # below the root of the repository, where scripts/quickstart goes
SHOWN_LINES = 16
LAST_STEP = 20_000  # of the run; a minute on a few cores does a thousand or two
INTERRUPTED = 130  # what shells report for Ctrl-C

Plan = Mapping[str, int]


def run(
    *, seconds: float, steps: int | None, corpus_mb: int, port: int, keep_serving: bool, fresh: bool
) -> int:
    """Take the tour; return the exit code of the command."""
    console = Console(highlight=False, soft_wrap=True)
    # By default SIGTERM would end this process without stopping the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    limit = ["--steps", str(steps)] if steps else ["--steps", str(LAST_STEP), "--seconds", f"{seconds:g}"]
    try:
        code = _tour(
            console, corpus_mb=corpus_mb, port=port, limit=limit, keep_serving=keep_serving, fresh=fresh
        )
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ServerFailed, OSError, ValueError) as error:
        console.print(f"[red]quickstart failed:[/] {type(error).__name__}:", end=" ")
        console.print(str(error), markup=False)
        return 1
    if code in (128 + signal.SIGTERM, -signal.SIGTERM):
        return INTERRUPTED
    return 1 if code else 0


def _tour(
    console: Console, *, corpus_mb: int, port: int, limit: list[str], keep_serving: bool, fresh: bool
) -> int:
    """Returns the exit code of the training."""
    _title(console, "A corpus of the text that comes with Python")
    corpus = text.build(HOME / "corpus", corpus_mb=corpus_mb, report=partial(console.print, markup=False))

    port = claim_port(port)
    url = f"http://{HOST}:{port}"
    corpora = {split: corpus / split for split in text.SPLITS}
    serve = _serve_command(corpora, port=port, state_dir=HOME / "state")
    _title(console, f"A server on {url}")
    console.print(shlex.join(serve), markup=False)
    import torch  # here, because it takes seconds in which nothing would have been said

    with running(serve, ready=partial(is_ready, url), log=HOME / "server.log"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        plan = training.PLAN[device]
        checkpoint = HOME / f"{corpus.name}-{device}.pt"
        if fresh:
            checkpoint.unlink(missing_ok=True)
        data = ["--corpus", "train", "--eval-corpus", "val", "--vocab-size", str(text.VOCAB_SIZE)]
        train = training.command(url, device, *data, "--checkpoint", str(checkpoint), *limit)
        _title(console, f"Training on {device}")
        console.print(shlex.join(train), markup=False)
        code = training.run(train)
        if code:
            return code
        _show_first_batch(console, url, plan)
        _show_what_to_try(console, url, plan, serve, train, is_serving=keep_serving)
        if keep_serving:
            console.print("\nserving until Ctrl-C")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    return 0


def _serve_command(corpora: Mapping[str, Path], *, port: int, state_dir: Path) -> list[str]:
    """What a person would type to serve these corpora on this machine only."""
    named = [f"{name}={os.path.relpath(path)}" for name, path in corpora.items()]
    state = os.path.relpath(state_dir)
    return [text.program(), "serve", *named, "--host", HOST, "--port", str(port), "--state-dir", state]


def _show_first_batch(console: Console, url: str, plan: Plan) -> None:
    _title(console, "What step 0 saw, its first row")
    rows = plan["global_batch_size"]
    one_row = _query("batches", plan, step=0, rank=0, world_size=rows, format="text")
    lines = get(url, one_row).decode().splitlines()
    for line in lines[:SHOWN_LINES]:
        console.print(line, markup=False)
    if len(lines) > SHOWN_LINES:
        console.print(f"[dim]... {len(lines) - SHOWN_LINES} more lines[/]")


def _show_what_to_try(
    console: Console, url: str, plan: Plan, serve: list[str], train: list[str], *, is_serving: bool
) -> None:
    _title(console, "To try")
    if not is_serving:
        console.print("# start the server again (Ctrl-C stops it)")
        console.print(shlex.join(serve), markup=False)
    console.print("# what is served; where the rows of step 1000 lie; the whole batch of step 0 as text")
    for path in (
        "/v1/corpora",
        _query("indices", plan, step=1000),
        _query("batches", plan, step=0, format="text"),
    ):
        console.print(f"curl -s '{url}{path}'", markup=False)
    console.print("# go on with the training, on two ranks (scripts/quickstart does so on one; --fresh anew)")
    torchrun = os.path.join(os.path.dirname(train[0]), "torchrun")  # noqa: PTH118, PTH120 - as it is typed
    console.print(shlex.join([torchrun, "--standalone", "--nproc-per-node=2", *train[1:]]), markup=False)


def _query(route: str, plan: Plan, **parameters: int | str) -> str:
    spelled = {name.removeprefix("global_"): value for name, value in plan.items()}
    return f"/v1/{route}?{urlencode({'corpus': 'train', **spelled, **parameters})}"


def _title(console: Console, title: str) -> None:
    console.print(f"\n[bold]{title}[/]")
