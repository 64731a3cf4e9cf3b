"""Every command of docs/start/replay.md runs as it stands there, and prints what the page shows."""

from __future__ import annotations

import json
import re
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from corpus_server.tools.importing import import_plan
from tests.followed import follow, needs_programs
from tests.serving import ROOT

PAGE = ROOT / "docs" / "start" / "replay.md"
SERVE = "corpus-server serve pile=pile"


@needs_programs
def test_the_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    assert follow(PAGE, tmp_path, SERVE, {"pile": tmp_path / "pile"}) >= 14


@pytest.mark.skipif(find_spec("olmo_core") is None, reason="OLMo-core, whose list it is, is not installed")
def test_a_mix_is_written_out_by_the_lines_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = {"vocab_size": 100278, "eos_token_id": 100257, "identifier": "allenai/dolma2-tokenizer"}
    dataset = {"mix": "OLMo-mix-0925-official", "mix_base_dir": "s3://ai2-llm", "sequence_length": 8192}
    config = {"dataset": {**dataset, "tokenizer": tokenizer}, "data_loader": {"global_batch_size": 2**22}}
    Path("config.json").write_text(json.dumps(config))
    (lines,) = re.findall(
        r"(?m)^    import json, pathlib\n    from olmo_core[^`]*?file\.write_text.*$", PAGE.read_text()
    )
    exec(compile(textwrap.dedent(lines), "replay.md", "exec"), {})
    found = import_plan("olmo", Path("config.json").read_text(), order="olmo")
    paths = found.corpora["olmo"].split(",")
    assert len(paths) > 900
    assert paths[-2:] == ["dtype=uint32", "eot=100257"]
    assert found.document["stages"][0]["global_batch_size"] == 512
