"""The OpenAPI description tells the truth: Schemathesis asks what it allows, and what it does not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import word_tokens
from tests.corpora import some_tokens, write_megatron, write_raw
from tests.serving import ROOT, RunningServer, environment

CONFIGURATION = Path(__file__).with_name("schemathesis.toml")


def explore(url: str, *, num_examples: int, seed: int) -> tuple[int, str]:
    """Run Schemathesis with every check; return its exit code and report."""
    program = "from schemathesis.cli import schemathesis; schemathesis()"
    done = subprocess.run(
        [
            *(sys.executable, "-c", program, "--config-file", str(CONFIGURATION), "run"),
            *(f"{url}/openapi.json", "--checks", "all", "--no-color"),
            *("--max-examples", str(num_examples), "--seed", str(seed)),
        ],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def described_server(folder: Path) -> RunningServer:
    """Return a server that is worth exploring."""
    web = write_raw(folder / "web.bin", some_tokens(4001, seed=1))
    write_megatron(folder / "docs", [[*range(1, 200), 99], [20, 99], [*range(100, 300), 99]])
    (folder / "words").mkdir()
    words = write_raw(folder / "words" / "0.bin", word_tokens(folder / "words" / "tokenizer.json")).parent
    return RunningServer({"web": web, "docs": folder / "docs.bin", "words": words}, folder)


def test_no_response_is_undocumented_and_nothing_is_refused_that_the_description_allows(
    tmp_path: Path,
) -> None:
    with described_server(tmp_path) as server:
        code, report = explore(server.url, num_examples=2, seed=1)
        assert code == 0, report
        assert re.search(r"(\d+) selected / \1 total", report), report
        assert "Traceback" not in server.log()
