"""`corpus-client`: what a server delivers to this machine, whether all is well, and what copies cost."""

from __future__ import annotations

import typer

from corpus_client.doctor.command import doctor
from corpus_client.tools.bench import bench
from corpus_client.tools.overlap import overlap
from corpus_client.tools.transfer import transfer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def root() -> None:
    """Client of corpus-server."""


for command in (bench, doctor, transfer, overlap):
    app.command()(command)


def main() -> None:
    """Entry point of the `corpus-client` command."""
    app()
