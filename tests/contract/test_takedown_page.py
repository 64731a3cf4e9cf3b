"""Every command of docs/start/takedown.md runs as it stands there, and prints what the page shows."""

from __future__ import annotations

from pathlib import Path

from tests.followed import follow, needs_programs
from tests.serving import ROOT

PAGE = ROOT / "docs" / "start" / "takedown.md"


@needs_programs
def test_the_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    assert follow(PAGE, tmp_path, "corpus-server serve web=web", {"web": tmp_path / "web"}) >= 20
