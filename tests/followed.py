"""Pages of the docs whose commands are run as they stand there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.serving import RunningServer, environment

needs_programs = pytest.mark.skipif(
    not all(map(shutil.which, ("bash", "curl", "jq"))), reason="needs bash, curl and jq"
)

PROGRAMS = {
    "python": sys.executable,
    "corpus-server": f"{sys.executable} -m corpus_server",
    "corpus-client": f"{sys.executable} -m corpus_client",
}


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Return the commands of a page, each with the lines that it shows; `$ ` begins one."""
    found: list[tuple[list[str], list[str]]] = []
    end, is_output = "", False
    for line in page.read_text().splitlines():
        text = line[4:]
        if line and not line.startswith("    "):
            is_output = False
        elif end:
            found[-1][0].append(text)
            end = "" if text == end else end
        elif text.startswith("$ "):
            found.append(([text[2:]], []))
            end, is_output = match[1] if (match := re.search(r"<<'(\w+)'", text)) else "", True
            end = "done" if text.endswith("; do") else end
        elif text and is_output:
            continued = found[-1][0][-1].endswith(("\\", "|")) and not found[-1][1]
            found[-1][0 if continued else 1].append(text)
    return [("\n".join(command), shown) for command, shown in found]


def pattern(line: str) -> str:
    """Return a pattern of a line in which `...` stands for anything."""
    return ".*".join(map(re.escape, line.split("...")))


def follow(page: Path, folder: Path, serve: str, corpora: Mapping[str, Path]) -> int:
    """Run the commands of a page in a folder; return how many.

    Args:
        serve: the command of the page that starts its server.
        corpora: of that server.
    """
    (folder / "bin").mkdir()
    for name, program in PROGRAMS.items():
        path = folder / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        path.chmod(0o755)
    own = environment(PATH=f"{folder / 'bin'}:{os.environ['PATH']}", COLUMNS="200")
    address, before, ran = "localhost:8000", "set -eu -o pipefail\n", 0
    with contextlib.ExitStack() as stack:
        for command, shown in commands(page):
            if command == serve:
                server = stack.enter_context(RunningServer(dict(corpora), folder))
                address = server.url.removeprefix("http://")
                continue
            script = before + command.replace("localhost:8000", address)
            done = subprocess.run(
                ["bash", "-c", script], env=own, capture_output=True, text=True, check=False, cwd=folder
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            printed, wanted = done.stderr + done.stdout, r"\n".join(map(pattern, shown))
            assert re.search(wanted, printed, re.DOTALL), f"{command}\nprinted\n{printed}"
            if re.match("[A-Z]=", command):
                before += script.removeprefix(before).partition("; echo")[0] + "\n"
            ran += 1
    return ran
