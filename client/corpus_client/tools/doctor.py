"""`corpus-client doctor`: is everything as it should be, and is data the bottleneck?"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from corpus_client.tools import report

_OF_A_RUN = ("seq_len", "batch_size", "world_size", "step_seconds", "seconds")


def doctor(
    context: typer.Context,
    urls: Annotated[list[str], typer.Argument(help=report.URLS)],
    corpus: Annotated[str | None, typer.Option(help="name of the corpus; default: the only one")] = None,
    seq_len: Annotated[int, typer.Option(help="inputs per row")] = 1024,
    batch_size: Annotated[int, typer.Option(help="rows per global batch")] = 64,
    world_size: Annotated[int, typer.Option(help="ranks among which a batch is divided", min=1)] = 1,
    step_seconds: Annotated[
        float | None, typer.Option(help="length of a training step that never waits for data")
    ] = None,
    seconds: Annotated[float, typer.Option(help="how long to measure bandwidth", min=0.1)] = 3.0,
    header: report.Header = None,
    token_file: report.TokenFile = None,
    device: report.Device = None,
    as_json: report.AsJson = False,
) -> None:
    """Check servers, replicas and this machine, and answer: is data my bottleneck?

    Exit code 1 if a check fails.

    Example: corpus-client doctor localhost:8000 --corpus fineweb --step-seconds 0.25
    """

    def examined() -> report.Report:
        from corpus_client.tools.examination import Run, examine

        sources = {name: context.get_parameter_source(name) for name in _OF_A_RUN}
        # By its name: the class is typer's own or click's, by typer's version.
        given = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
        run = Run(
            options=[f"--{name.replace('_', '-')}" for name in given],
            corpus=corpus,
            seq_len=seq_len,
            batch_size=batch_size,
            world_size=world_size,
            step_seconds=step_seconds,
            seconds=seconds,
        )
        network = report.read_network("doctor", header, token_file)
        return examine(run, urls, replace(network, deadline_seconds=report.RESPONSE_SECONDS), device)

    if report.run(examined, as_json=as_json).data["status"] == "fail":
        raise typer.Exit(1)
