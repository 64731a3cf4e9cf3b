"""`corpus-server stage`: fill the cache of corpora in object stores before a job begins."""

from __future__ import annotations

import json
import re
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from corpus_server.admission.request import ANYONE
from corpus_server.cli.common import (
    CORPUS_HELP,
    MAX_PLAN_BYTES,
    AsJson,
    fetched_if_needed,
    note,
    print_json,
    progress,
)
from corpus_server.cli.files import Files
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter, InvalidPlan, counted
from corpus_server.plan_store.saved import read_saved
from corpus_server.readers.filling import fill, needed
from corpus_server.responses.service import Service
from corpus_server.settings import Settings
from corpus_server.tools.exchange import load_plan
from corpus_server.user_files import read_given, reason_of
from corpus_server.work import Budget

_USUAL_RATE = 100e6  # bytes per second, of which a dry run tells the time


def stage(
    plan: Annotated[Path, typer.Option(metavar="FILE", help="A plan as JSON, or what `plans save` wrote.")],
    steps: Annotated[str, typer.Option(metavar="FIRST:STOP", help="Steps of the plan, without STOP.")],
    corpora: Annotated[
        list[CorpusSpec] | None,
        typer.Argument(parser=CorpusSpec.parse, metavar="CORPUS...", help=CORPUS_HELP, show_default=False),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="corpus.toml of the server.", exists=True)] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="As of `serve`.")] = None,
    cache_bytes: Annotated[int | None, typer.Option(help="As of `serve`.")] = None,
    extent_bytes: Annotated[int | None, typer.Option(help="As of `serve`.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what is needed; fetch nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch what steps of a plan read from object stores into the cache of a server, before it serves them.

    What is there already stays, so the same command goes on after it was ended.

    Example: corpus-server stage web=s3://bucket/web --plan plan.json --steps 0:2000
    """
    wanted = _steps(steps)
    specs = tuple(map(fetched_if_needed, corpora or []))
    given = {"cache_dir": cache_dir, "cache_bytes": cache_bytes, "extent_bytes": extent_bytes}
    settings = Settings.read(config, corpora=specs, **given)
    with tempfile.TemporaryDirectory(prefix="corpus-server-") as folder:
        settings = replace(settings, state_dir=Path(folder), tokens=None)
        with Service.open(settings) as service:
            bound = service.plan(_known(plan, Files(service)), ANYONE, Budget())
            extents = needed(bound, wanted)
            total = sum(each.size_bytes for each in extents)
            missing = sum(each.size_bytes for each in extents if not each.is_cached)
            said = (
                f"steps {steps} read {counted(len(extents), 'extent')}, {decimal(total)}; "
                f"{decimal(missing)} to fetch"
            )
            if not bound.is_staged:
                note("no corpus of the plan lies in an object store: nothing is staged")
            note(f"{said}, about {missing / _USUAL_RATE:,.0f} s at {decimal(int(_USUAL_RATE))}/s")
            fetched, began = 0, time.monotonic()
            if not dry_run:
                with progress(quiet=as_json) as report:
                    fetched = fill(
                        extents,
                        service.settings.cache_bytes,
                        lambda num_bytes: report("fetching", num_bytes, missing, 0),
                        threading.Event(),
                    )
            seconds = time.monotonic() - began
    if as_json:
        figures = {"num_extents": len(extents), "num_bytes": total, "missing_bytes": missing}
        print_json({**figures, "fetched_bytes": fetched, "seconds": round(seconds, 3)})
    elif not dry_run:
        rate = decimal(int(fetched / max(seconds, 1e-3)))
        note(f"fetched {decimal(fetched)} in {seconds:,.1f} s, {rate}/s; all of it is in the cache")


def _steps(text: str) -> range:
    found = re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise InvalidParameter.expected("steps", "FIRST:STOP with FIRST below STOP, for example 0:2000", text)
    return range(int(found[1]), int(found[2]))


def _known(file: Path, files: Files) -> str:
    """Make a plan known, and return its id."""
    try:
        text = read_given(file, max_bytes=MAX_PLAN_BYTES)
        is_saved = "kind" in json.loads(text)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidParameter(f"{file} is no plan: {reason_of(error)}", parameter="plan") from error
    if not is_saved:
        return str(files.ask("/v1/plans", text.encode())["id"])
    try:
        saved = read_saved(text)
    except InvalidPlan as error:
        raise error.in_file(str(file)) from error
    return load_plan(saved, files.ask)
