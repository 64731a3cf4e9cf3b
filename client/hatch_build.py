"""What a package index shows of the two packages: a description without broken links, and addresses."""

import re
from collections.abc import Callable
from pathlib import Path
from posixpath import join, normpath
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ADDRESS = ""
"""Of the repository, as `https://github.com/ORG/corpus-server`. Fill it in here, and nowhere else, when the
repository has one: the packages then name it, and links of their descriptions and of the site lead there."""

_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:!\[[^\]]*\]\([^)]*\)|[^\[\]])+)\]\((?P<target>[^)\s]+)\)")


def relink(text: str, folder: str, target_of: Callable[[str, bool], str | None]) -> str:
    """Give the relative links and pictures of a Markdown text other targets.

    Args:
        text: of a page.
        folder: of the page, relative to the root of the repository.
        target_of: gets a path from that root, with its `#anchor`, and whether it is a picture. Returns the
            new target, or None: a link then becomes its text, and a picture goes.
    """

    def replaced(match: re.Match[str]) -> str:
        target, is_picture = match["target"], bool(match["picture"])
        inner = match["text"] if is_picture else _LINK.sub(replaced, match["text"])
        if not target.startswith("#") and "://" not in target:
            new = target_of(normpath(join(folder, target)), is_picture)
            if new is None:
                return "" if is_picture else inner
            target = new
        return f"{match['picture']}[{inner}]({target})" if inner else ""

    return _LINK.sub(replaced, text)


def in_repository(path: str, is_picture: bool = False) -> str | None:
    """Return the address of a file of the repository, or None while the repository has none."""
    return f"{ADDRESS}/{'raw' if is_picture else 'blob'}/main/{path}" if ADDRESS else None


def description(readme: str, folder: str) -> str:
    """Return a README for a package index, which knows neither other files nor the page's headings."""
    return relink(readme.replace("](#", "](README.md#"), folder, in_repository)


class Description(MetadataHookInterface):
    """Fills in `readme` and `urls` of a `pyproject.toml`."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the two fields that are declared as dynamic."""
        folder = "client" if metadata["name"] == "corpus-client" else ""
        text = description((Path(self.root) / "README.md").read_text(encoding="utf-8"), folder)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if ADDRESS:
            pages = {"Source": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}
            metadata["urls"] = {name: ADDRESS + path for name, path in pages.items()}
