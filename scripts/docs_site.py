"""Hooks of MkDocs: pages that lie outside docs/, the reference of the commands, links that leave the site.

Beside the pages the site has two texts for language models (llmstxt.org): `llms.txt` lists the pages, and
`llms-full.txt` holds all of them, as Markdown.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from posixpath import dirname, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation, Section
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

_nav: list[Navigation] = []  # of the site that is built; MkDocs shows it to one hook only


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


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Keep the order of the pages for the texts that list them."""
    _nav[:] = [nav]
    return nav


def on_post_build(config: MkDocsConfig) -> None:
    """Write `llms.txt` and `llms-full.txt`."""
    pages = _nav[0].pages
    chapters: dict[str, list[str]] = {}
    for page in pages:
        chapter = page.parent.title if isinstance(page.parent, Section) else "Pages"
        about = first_sentence(page.markdown or "")
        chapters.setdefault(chapter, []).append(f"- [{page.title}]({_address(page)}): {about}")
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    lines += ["All pages in one file: [llms-full.txt](llms-full.txt)"]
    for chapter, listed in chapters.items():
        lines += ["", f"## {chapter}", "", *listed]
    site = Path(config.site_dir)
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    whole = (f"<!-- {_address(page)} -->\n\n{(page.markdown or '').strip()}\n" for page in pages)
    (site / "llms-full.txt").write_text("\n".join(whole), encoding="utf-8")


def _address(page: Page) -> str:
    return page.canonical_url or page.url or "./"


def first_sentence(markdown: str) -> str:
    """Return the first sentence of a page's first paragraph, without links and emphasis."""
    paragraphs = re.split(r"\n\s*\n", markdown)
    marks = ("#", "|", "!", "-", "    ", "<", ":::", "```")
    text = next((each for each in paragraphs if each.strip() and not each.startswith(marks)), "")
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)|\*\*", lambda found: found[1] or "", " ".join(text.split()))
    return re.split(r"(?<=[.:?!]) (?=[A-Z])", plain)[0]


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
