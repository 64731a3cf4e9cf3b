"""Runs of the commands are folded away on the page: the server knows the names that they give themselves."""

from __future__ import annotations

import re

from corpus_server.live import TOOLS
from tests.serving import ROOT


def test_every_command_that_names_itself_is_a_tool() -> None:
    folder = ROOT / "client" / "corpus_client" / "tools"
    named = {
        name
        for path in folder.glob("*.py")
        for name in re.findall(r'read_network\(\s*"([a-z-]+)"', path.read_text())
    }
    assert {"bench", "bill"} < named
    assert named | {"corpus-server"} == TOOLS
