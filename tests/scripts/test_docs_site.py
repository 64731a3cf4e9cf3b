"""The site that MkDocs builds has its pages for language models, too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.serving import ROOT


def test_the_site_has_texts_for_language_models(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    address = "https://example.org/docs/"
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "SITE_URL": address}
    subprocess.run(command, cwd=ROOT, env=variables, check=True, stdout=subprocess.DEVNULL)
    listed = (tmp_path / "llms.txt").read_text()
    assert listed.startswith("# corpus-server\n\n> ")
    pages = re.findall(r"^- \[[^\]]+\]\(([^)]*)\): .{10,}$", listed, re.MULTILINE)
    named = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(pages) == len(named)
    for page in pages:
        assert (tmp_path / page.removeprefix(address) / "index.html").exists(), page
    whole = (tmp_path / "llms-full.txt").read_text()
    for page in ROOT.glob("docs/**/*.md"):
        assert page.read_text().partition("\n")[0] in whole, page
    assert "corpus-server inspect" in whole, "the reference of the commands is a page, too"
    assert all(f"<!-- {page} -->" in whole for page in pages)
