"""What README and the chapters say about this repository is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from client import hatch_build
from corpus_client import errors as client_errors
from corpus_server import errors
from tests import layers
from tests.serving import ROOT

TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("client/**/*.md")])

_LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_CODE = re.compile(r"^(?:```.*?^```|    .*?$)|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def test_troubleshooting_has_a_chapter_for_every_error() -> None:
    def slugs(kind: type[errors.CorpusServerError]) -> set[str]:
        return {kind.slug}.union(*map(slugs, kind.__subclasses__()))

    chapters = re.findall(r"^### (\S+)$", TROUBLESHOOTING, re.MULTILINE)
    framework = {"not-found", "method-not-allowed", "http-error"}
    assert sorted(chapters) == sorted(slugs(errors.CorpusServerError) | framework)


def test_troubleshooting_names_every_error_of_the_client() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", layers.chapter(TROUBLESHOOTING, "Errors of the client")))
    base, groups = client_errors.CorpusClientError, {"TransportError", "ReplicaUnusable"}
    classes = {
        n for n, kind in vars(client_errors).items() if isinstance(kind, type) and issubclass(kind, base)
    }
    assert classes - groups == named


def anchors(page: Path) -> set[str]:
    """Return the names that a page's headings get on GitHub."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = _CODE.sub("", page.read_text())
    for target, anchor in _LINK.findall(text):
        if "://" in target:
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"


@pytest.mark.parametrize("address", ["", "https://example.org/corpus-server"])
@pytest.mark.parametrize("folder", ["", "client"])
def test_links_of_a_package_page_lead_somewhere(
    folder: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the repository has no address, links of the description are plain text, and pictures go."""
    monkeypatch.setattr(hatch_build, "ADDRESS", address)
    shown = hatch_build.description((ROOT / folder / "README.md").read_text(), folder)
    targets = re.findall(r"\]\(([^)]*)\)", _CODE.sub("", shown))
    assert all(target.startswith(f"{address}/") if address else "://" in target for target in targets)
    for target in targets if address else ():
        path = re.sub(r"^/(blob|raw)/main/|#.*", "", target.removeprefix(address))
        assert (ROOT / path).exists(), target
    assert bool(targets) == bool(address)
