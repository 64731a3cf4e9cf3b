"""`corpus-server serve`."""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from corpus_server.admission.access import Access
from corpus_server.cli.common import CORPUS_HELP, fetched_if_needed
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.run import run
from corpus_server.settings import EXPOSED, Settings, all_settings


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option per setting; it receives their values as keyword arguments."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    for setting in all_settings():
        # None stands for "not given", so that the value of the file applies; hence the default as text.
        shown = setting.default
        if setting.name in EXPOSED:
            shown += f"; with --exposed {EXPOSED[setting.name]}"
        option = typer.Option(help=setting.help, show_default=shown or False)
        parameters.append(
            inspect.Parameter(
                setting.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[Optional[setting.kind], option],  # noqa: UP045  # `|` needs a static type
            )
        )
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


@_with_settings
def serve(
    corpora: Annotated[
        list[CorpusSpec] | None,
        typer.Argument(
            parser=CorpusSpec.parse,
            metavar="CORPUS...",
            help=f"{CORPUS_HELP} The name defaults to that of the file or folder.",
            show_default=False,
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="corpus.toml; options have priority over the file.", exists=True)
    ] = None,
    splits: Annotated[
        bool, typer.Option("--splits", help="Serve each split of the corpora named here, as NAME-SPLIT.")
    ] = False,
    **given: Any,
) -> None:
    """Serve corpora over HTTP until Ctrl-C or SIGTERM.

    SIGHUP reads the configuration again and replaces the workers without a failed request.

    Example: corpus-server serve fineweb=/data/fineweb --workers 4
    """

    # It would end the process. The supervisor heeds it, once the settings are read.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def read_settings() -> Settings:
        specs = [fetched_if_needed(spec, splits=splits) for spec in corpora or []]
        if splits:
            from corpus_server.corpus.selection import corpora_of_splits  # 0.3 s of CPU

            specs = [each for spec in specs for each in corpora_of_splits(spec)]
        settings = Settings.read(config, corpora=tuple(specs), **given)
        settings = replace(settings, corpora=tuple(map(fetched_if_needed, settings.corpora)))
        Access(settings.tokens)  # a mistake in the file is found before any worker starts
        return settings

    run(read_settings)
