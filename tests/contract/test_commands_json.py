"""What commands print with `--json` has the fields that docs/commands.schema.json says.

Scripts read these objects: a field that changes or goes is a line of the changelog and of the schema. A new
one may come without, and is added to the schema when it is to be relied on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from corpus_client.tools.app import app as client
from corpus_server.cli import app as server
from tests.corpora import some_tokens, write_raw
from tests.recorded import Record, write_part
from tests.reference import one_source
from tests.serving import ROOT, RunningServer, run_here

SCHEMAS: dict[str, Any] = json.loads((ROOT / "docs" / "commands.schema.json").read_text())["$defs"]
Outputs = dict[str, list[Any]]


def jsonl(path: Path, *lines: Mapping[str, Any]) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    return path


def printed(folder: Path) -> Outputs:
    """Run every command that has `--json`, in several cases; return what they printed, by command."""
    found: Outputs = {}

    def keep(name: str, code: int, text: str, said: str, expected: int | None = 0) -> None:
        assert expected in (code, None), (name, code, said)
        found.setdefault(name, []).append(json.loads(text))

    def of_server(name: str, *words: str | Path, code: int | None = 0) -> None:
        done = run_here(*name.split()[1:], *words, "--json")
        keep(name, done.returncode, done.stdout, done.stderr, code)

    def of_client(name: str, *words: str | Path, code: int | None = 0) -> None:
        done = CliRunner().invoke(client, [*name.split()[1:], *map(str, words), "--json"])
        keep(name, done.exit_code, done.stdout, done.output, code)

    _of_files(folder, of_server)
    web = write_raw(folder / "web.bin", some_tokens(5000))
    (folder / "serving").mkdir()
    with RunningServer({"web": web, "docs": folder / "indexed.bin"}, folder / "serving") as running:
        plan = running.post_plan(one_source("web", 16, 8)).json()
        other = running.post_plan({**one_source("web", 16, 8), "seed": 9}).json()["id"]
        file = folder / "plan.json"
        file.write_text(json.dumps(plan["plan"]))
        write_part(
            folder / "losses", [Record(0, row, "web", 2 + row % 3) for row in range(8)], plan=plan["id"]
        )
        of_server("corpus-server plans list", running.url)
        of_server("corpus-server plans show", plan["id"], running.url)
        of_server("corpus-server plans make", file, running.url)
        passes = jsonl(
            folder / "passes.json",
            {"seq_len": 16, "stages": [{"global_batch_size": 8, "epochs": {"web": 2}}]},
        )
        of_server("corpus-server plans make", passes, running.url)
        (folder / "run.json").write_text(run_here("plans", "save", plan["id"], running.url).stdout)
        of_server("corpus-server plans load", folder / "run.json", running.url)
        of_server("corpus-server plans diff", plan["id"], other, running.url)
        of_server("corpus-server plans diff", plan["id"], plan["id"], running.url)
        (folder / "report.json").write_text('{"corpora": [], "exclude": {"web": [[0, 20]]}}')
        out = ("--report", folder / "report.json", "--at-step", "3")
        of_server("corpus-server plans successor", plan["id"], running.url, *out)
        member = {**one_source("docs", 16, 8), "family": {"leave_out": 0.1, "member": 0}}
        member_id = running.post_plan(member).json()["id"]
        of_server("corpus-server plans members", member_id, "0", running.url, "--count", "2")
        cache = ("--plan", file, "--steps", "0:3", "--cache-dir", folder / "cache")
        of_server("corpus-server stage", f"web={web}", *cache)
        of_server("corpus-server spikes", folder / "losses", running.url)
        of_server("corpus-server spikes", folder / "losses")
        steps = ("--plan", file, "--stop", "3", "--out")
        of_client("corpus-client export", running.url, *steps, folder / "steps.npy")
        of_client("corpus-client bill", running.url, *steps, folder / "bill.json")
        of_client("corpus-client prove", folder / "bill.json", "--step", "1", "--out", folder / "proof.json")
        of_client("corpus-client verify-bill", folder / "bill.json", running.url)
        of_client(
            "corpus-client verify-bill", folder / "bill.json", running.url, "--proof", folder / "proof.json"
        )
        bench = ("--corpus", "web", "--seq-len", "16", "--batch-size", "8", "--seconds", "0.1")
        of_client("corpus-client bench", running.url, *bench)
        of_client(
            "corpus-client doctor", running.url, *bench[2:6], code=None
        )  # what it finds is the machine's
    of_client("corpus-client doctor", running.url, code=1)
    of_client("corpus-client transfer")
    of_server("corpus-server plans keep", plan["id"], "--state-dir", running.state_dir)
    return found


def _of_files(folder: Path, run: Callable[..., None]) -> None:
    texts = jsonl(folder / "t.jsonl", *({"text": f"text {i} and more", "url": f"u{i}"} for i in range(40)))
    options = ("--tokenizer", "bytes", "--keep", "url", "--processes", "1", "--out")
    run("corpus-server build", texts, *options, folder / "built")
    run("corpus-server build", texts, "--split", "val=0.3", *options, folder / "split")
    run("corpus-server merge", folder / "built", folder / "split" / "val", "--out", folder / "merged")
    run("corpus-server inspect", folder / "built", "--seq-len", "8", "--stats")
    run("corpus-server verify", folder / "built")
    scores = jsonl(folder / "m.jsonl", *({"score": i} for i in range(40)))
    run("corpus-server index", folder / "built", "--metadata", scores)
    view = ("--where", "score > 3", "--out", folder / "some.view")
    run("corpus-server view create", folder / "built", *view)
    run("corpus-server view show", folder / "some.view")
    run("corpus-server find", folder / "built", "--text", "text 3 and more text 4", "-n", "8")
    raw = write_raw(folder / "raw.bin", some_tokens(5000))
    run("corpus-server inspect", raw)
    run("corpus-server verify", raw)
    run("corpus-server verify", raw, "--record")
    with raw.open("r+b") as file:
        file.write(b"\xff\xff")
    run("corpus-server verify", raw, code=1)
    run("corpus-server index", f"{write_raw(folder / 'indexed.bin', some_tokens(500))},eot=3")
    run("corpus-server token", folder / "tokens.toml", "me", "--scope", "plans", "--expires", "2100-01-01")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return printed(tmp_path_factory.mktemp("commands"))


def with_json(group: Any, name: str) -> Iterator[str]:
    """Yield the names of the commands that have `--json`."""
    context = group.make_context(name, [], resilient_parsing=True)
    for each in group.list_commands(context):
        command = group.get_command(context, each)
        if hasattr(command, "list_commands"):
            yield from with_json(command, f"{name} {each}")
        elif any("--json" in parameter.opts for parameter in command.params):
            yield f"{name} {each}"


def test_every_command_with_json_has_a_schema_and_is_run(outputs: Outputs) -> None:
    named = {
        *with_json(get_command(server), "corpus-server"),
        *with_json(get_command(client), "corpus-client"),
    }
    assert named == set(SCHEMAS) == set(outputs)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_printed_is_what_the_schema_says(outputs: Outputs, name: str) -> None:
    validator = jsonschema.Draft202012Validator({"$defs": SCHEMAS, **SCHEMAS[name]})
    for each in outputs[name]:
        validator.validate(each)
