"""Hooks of MkDocs: pages that lie outside docs/, the reference of the commands, links that leave the site."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from posixpath import dirname, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "client")]

from hatch_build import in_repository, relink  # noqa: E402 - MkDocs runs this file by its path

ELSEWHERE = {
    "client/README.md": "client.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files outside docs/ and the pages of the site that show them."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not below docs/."""
    from corpus_client.tools.app import app as client
    from corpus_server.cli import app as server

    made = {page: (ROOT / source).read_text() for source, page in ELSEWHERE.items()}
    made["reference/corpus-server.md"] = command_reference(server, "corpus-server")
    made["reference/corpus-client.md"] = command_reference(client, "corpus-client")
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to the site's pages, and those to other files to the repository, if its address is known."""
    here = page.file.src_uri
    source = next((path for path, shown in ELSEWHERE.items() if shown == here), f"docs/{here}")

    def target(path: str, is_picture: bool) -> str | None:
        path, hash_sign, anchor = path.partition("#")
        shown = {"README.md": "index.md", **ELSEWHERE}.get(path, path.removeprefix("docs/"))
        is_elsewhere = shown == path and (ROOT / path).exists()
        if is_elsewhere:
            return in_repository(path + hash_sign + anchor, is_picture)
        return relpath(shown, dirname(here) or ".") + hash_sign + anchor  # MkDocs reports what does not exist

    return relink(four_spaces(markdown), dirname(source), target)


def four_spaces(markdown: str) -> str:
    """Indent what belongs to an item of a list by four spaces, because Python-Markdown takes no less."""
    lines, more = [], 0
    for line in markdown.splitlines():
        if item := re.match(r"(- +|\d+\. +)\S", line):
            more = 4 - len(item[1])
        elif line and not line.startswith("  "):
            more = 0
        lines.append(" " * more + line if line.startswith("  ") else line)
    return "\n".join(lines) + "\n"


def command_reference(app: Any, name: str) -> str:
    """Return a page with every command of a typer application: what it does, its usage and its options."""
    from typer.main import get_command

    root: Any = get_command(app)
    intro = f"# {name}\n\n{root.help}\n\n`{name} COMMAND --help` prints the same."
    context = root.make_context(name, [], resilient_parsing=True)
    return "\n\n".join([intro, *_commands(root, context, 2)]) + "\n"


def _commands(group: Any, context: Any, level: int) -> list[str]:
    """Return the chapters of a group's commands, and of groups among them."""
    chapters = []
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inner = command.make_context(name, [], parent=context, resilient_parsing=True)
        usage = " ".join([inner.command_path, *command.collect_usage_pieces(inner)])
        chapters.append(f"{'#' * level} {inner.command_path}\n\n{command.help}\n\n    {usage}")
        records = [parameter.get_help_record(inner) for parameter in command.get_params(inner)]
        lines = [f"| `{_cell(left)}` | {_cell(right)} |" for left, right in filter(None, records)]
        chapters.append("\n".join(["| argument or option | what it says |", "|---|---|", *lines]))
        if hasattr(command, "list_commands"):
            chapters += _commands(command, inner, level + 1)
    return chapters


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
