"""`corpus-server merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corpus_server.building.merge import merge as merge_corpora
from corpus_server.cli.common import AsJson, console, print_json


def merge(
    corpora: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", help="Folders that build wrote, or their manifests.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the merged corpus; must not exist.")],
    copy: Annotated[
        bool,
        typer.Option("--copy", help="Copy the shards: for another file system, or while they are served."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Join built corpora by hard links, without moving a token."""
    merged = merge_corpora(corpora, out, copy=copy)
    if as_json:
        print_json(
            [
                {
                    "path": out if split is None else out / split,
                    "num_tokens": manifest.num_tokens,
                    "num_documents": manifest.num_documents,
                    "num_shards": len(manifest.shards),
                    "fingerprint": manifest.fingerprint,
                }
                for split, manifest in merged.items()
            ]
        )
        return
    for split, manifest in merged.items():
        console.print(
            f"{out if split is None else out / split}: {manifest.num_tokens:,} tokens of "
            f"{manifest.num_documents:,} documents in {len(manifest.shards):,} shards, "
            f"{manifest.fingerprint}",
            soft_wrap=True,
        )
