"""`corpus-server plans` over what a server has seen."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from corpus_server.plan import Plan
from corpus_server.plan_store import PlanStore
from tests.corpora import some_tokens, write_raw
from tests.reference import one_source
from tests.serving import RunningServer, run_here
from tests.tokens import Tokens


def run(*arguments: str | Path, token: str = "") -> subprocess.CompletedProcess[str]:
    return run_here("plans", *arguments, CORPUS_TOKEN=token)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """Return the state folder of a server that has seen three plans, its corpus, and their ids."""
    tmp_path = tmp_path_factory.mktemp("seen")
    path = write_raw(tmp_path / "web.bin", some_tokens(5000))
    later: list[dict[str, Any]] = [
        one_source("web", 16, 8, seed=1),
        one_source("web", 16, 8, seed=1, skip_steps=[[40, 42]]),
        one_source("web", 16, 8, seed=2),
    ]
    with RunningServer({"web": path}, tmp_path) as server:
        ids = [server.post_plan(document).json()["id"] for document in later]
        running = json.loads(run("list", "--json", "--state-dir", tmp_path / "state").stdout)
        assert {plan["id"] for plan in running["plans"]} == set(ids)
    return tmp_path / "state", path, ids


def test_list_and_show(seen: tuple[Path, Path, list[str]]) -> None:
    state, _, plans = seen
    listed = run_here("plans", "list", "--state-dir", state, COLUMNS="80")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert all(plan[:12] in listed.stdout for plan in plans)
    assert "shuffle" in listed.stdout
    assert "…" not in listed.stdout
    nobody = run("list", "--state-dir", state, "--run", "nobody")
    assert (nobody.returncode, nobody.stdout) == (0, "")
    assert "run 'nobody' has posted no plan; list all without --run" in nobody.stderr
    shown = run("show", plans[0][:10], "--state-dir", state)
    assert hashlib.sha256(shown.stdout.encode()).hexdigest() == plans[0]
    assert Plan.from_json(json.loads(shown.stdout)).id == plans[0]


def test_a_list_on_a_narrow_terminal_breaks_no_word(tmp_path: Path) -> None:
    """Where the columns have no room for whole words, a plan is a paragraph."""
    names = {
        "fineweb-edu-10bt-sample": "shuffle",
        "code": {"shuffle": {"block_windows": 64, "group_blocks": 2}},
    }
    paths = {name: write_raw(tmp_path / f"{name}.bin", some_tokens(5000)) for name in names}
    with RunningServer(paths, tmp_path) as server:
        for number, (name, order) in enumerate(names.items()):
            server.post_plan(one_source(name, 16, 8, seed=2**63 + number, order=order))
        for columns in ("80", "60", "200"):
            said = run_here("plans", "list", server.url, COLUMNS=columns).stdout
            words = ("fineweb-edu-10bt-sample", str(2**63), str(2**63 + 1), "code")
            assert [word for word in words if word not in said] == [], said


def test_diff(seen: tuple[Path, Path, list[str]]) -> None:
    state, path, (one, skipping, _) = seen
    documents = run("diff", one[:10], skipping[:10], "--state-dir", state)
    assert (documents.returncode, documents.stderr) == (0, "")
    for part in ("skip_steps", "[[40, 42]]", "Steps before 40 hold the same rows"):
        assert part in documents.stdout
    narrow = run_here("plans", "diff", one, skipping, "--state-dir", state, COLUMNS="40")
    assert "…" not in narrow.stdout
    asked = ["diff", one, skipping, "--state-dir", state, "--corpus", f"web={path}", "--steps", "2"]
    rows = run(*asked)
    assert "The first step that differs is 40." in rows.stdout
    assert "0-7" in rows.stdout
    assert "Before step" not in rows.stdout  # a row has no counterpart where a plan skips steps
    response = json.loads(run(*asked, "--json").stdout)
    assert (response["a"], response["b"], response["equal_steps"]) == (one, skipping, 40)
    assert response["fields"] == [{"field": "skip_steps", "a": [], "b": [[40, 42]], "num_a": 0, "num_b": 1}]
    assert response["rows"]["first_step"] == 40
    changed = [(step["step"], step["plan_steps"]) for step in response["rows"]["steps"]]
    assert changed == [(40, [40, 42]), (41, [41, 43])]
    assert "The two plans are the same." in run("diff", one, one, "--state-dir", state).stdout


def test_a_server_and_its_state_folder_give_the_same(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "web.bin", some_tokens(5000))
    tokens = Tokens(tmp_path / "tokens.toml")
    tokens.add("reader", "read:*", "plans", "inspect")
    header = tokens.header("reader")
    with RunningServer({"web": path}, tmp_path, arguments=["--tokens", str(tokens.path)]) as server:
        one, other = (
            server.get(
                "/v1/plans",
                method="POST",
                body=json.dumps(one_source("web", 16, 8, seed=seed)).encode(),
                headers={**header, "Corpus-Run": f"run-{seed}"},
            ).json()["id"]
            for seed in (1, 2)
        )
        for asked in (
            ["list"],
            ["list", "--run", "run-2", "--json"],
            ["show", one],
            ["show", other[:9], "--json"],
        ):
            of_server = run(*asked, server.url, token=header["Authorization"][7:])
            of_folder = run(*asked, "--state-dir", tmp_path / "state")
            assert (of_server.returncode, of_server.stderr) == (0, "")
            assert of_server.stdout == of_folder.stdout
        for option in ((), ("--json",)):
            asked = ["diff", one, other, *option]
            of_server = run(*asked, server.url, token=header["Authorization"][7:])
            of_folder = run(*asked, "--state-dir", tmp_path / "state", "--corpus", f"web={path}")
            assert (of_server.returncode, of_server.stderr) == (0, "")
            assert of_server.stdout == of_folder.stdout
        refused = run("list", server.url)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "token" in refused.stderr


def test_a_plan_that_continues_another_is_shown_by_a_server_as_by_its_state(tmp_path: Path) -> None:
    paths = {name: write_raw(tmp_path / f"{name}.bin", some_tokens(5000)) for name in ("web", "code")}
    with RunningServer(paths, tmp_path) as server:
        root = server.post_plan(one_source("web", 16, 8)).json()["id"]
        excluded = {
            "from_step": 5,
            "global_batch_size": 8,
            "mixture": {"web": 1},
            "exclude": {"web": [[3, 99]]},
        }
        mixed = {"from_step": 9, "global_batch_size": 4, "mixture": {"web": 1, "code": 3}}
        middle = server.post_plan({"parent": root, "stages": [excluded]}).json()["id"]
        last = server.post_plan({"parent": middle, "stages": [mixed]}).json()["id"]
        for asked in (["show", last], ["show", middle[:12], "--json"], ["show", root]):
            of_server = run(*asked, server.url)
            assert (of_server.returncode, of_server.stderr) == (0, "")
            assert of_server.stdout == run(*asked, "--state-dir", tmp_path / "state").stdout
        assert hashlib.sha256(run("show", last, server.url).stdout.encode()).hexdigest() == last
        corpora = [word for name, path in paths.items() for word in ("--corpus", f"{name}={path}")]
        rows = json.loads(run("diff", middle, last, server.url, *corpora, "--json").stdout)["rows"]
        assert rows["first_step"] == 9
        unknown = run("show", "0" * 64, server.url)
        assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)


def test_a_plan_is_kept_and_a_wrong_folder_is_not_made(
    seen: tuple[Path, Path, list[str]], tmp_path: Path
) -> None:
    state, _, (one, *_) = seen
    kept = run("keep", one[:10], "--state-dir", state, "--json")
    assert json.loads(kept.stdout) == {"id": one, "kept": True}
    assert run("keep", one[:10], "--state-dir", tmp_path / "typo").returncode == 2
    assert not (tmp_path / "typo").exists()


def test_mistakes_are_one_clear_line(seen: tuple[Path, Path, list[str]], tmp_path: Path) -> None:
    state, path, (one, skipping, _) = seen
    other = write_raw(tmp_path / "other.bin", some_tokens(5000, seed=5))
    for arguments, message in (
        (
            ["show", "0123456789abcdef", "--state-dir", state],
            "no plan here begins with '0123456789abcdef' (`corpus-server plans list` shows",
        ),
        *(
            ([*words, "--state-dir", state], "the first 8 of them or more, got '")
            for words in (["show", "xyz"], ["show", one[:7]], ["save", one[:7]], ["keep", one[:7]])
        ),
        (
            ["list", "--state-dir", tmp_path / "none"],
            "holds no plans that can be read; give the URL of a server",
        ),
        (
            ["list", "127.0.0.1:9"],
            "http://127.0.0.1:9: Connection refused (is the",
        ),
        (["list", "http://[", "--state-dir", state], "state_dir must be left out with a server's URL"),
        (["list", "http://["], "no URL of a server: http://["),
        (["list", "web"], "url must be http://host:port of a server, got 'web'"),
        (
            ["diff", one, skipping, "--state-dir", state, "--corpus", f"code={path}"],
            "reads corpus 'web': name it with --corpus web=PATH",
        ),
        (
            ["diff", one, skipping, "--state-dir", state, "--corpus", f"web={other}"],
            "corpus 'web' has other content than the plan",
        ),
    ):
        said = run(*arguments)
        assert (said.returncode, said.stdout) == (2, "")
        assert message in said.stderr
        assert "Traceback" not in said.stderr
    assert not (tmp_path / "none").exists()


def test_an_abbreviation_of_several_plans_names_them(tmp_path: Path) -> None:
    with PlanStore(tmp_path) as store:
        for seed in (7928, 50895):  # found by trying: their ids begin with the same 8 digits
            document = one_source("web", 8, 4, seed=seed, fingerprints={"web": "sampled-00"})
            store.add(Plan.from_json(document))
    said = run("diff", "e53ac400", "e53ac400", "--state-dir", tmp_path)
    assert said.returncode == 2
    assert "several plans begin with 'e53ac400': e53ac400" in said.stderr
    assert "give more digits" in said.stderr


def test_import_prints_a_plan_and_says_what_is_left_out(tmp_path: Path) -> None:
    blend = tmp_path / "blend.txt"
    blend.write_text("0.7 /data/web 0.3 /data/code")
    done = run("import", "megatron", blend, "--seq-len", "8", "--batch-size", "4")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stages"][0]["mixture"] == {"web": 0.7, "code": 0.3}
    assert "not carried over: the order" in done.stderr
    assert "serve web=/data/web code=/data/code" in done.stderr
    done = run("import", "megatron", blend, "--seq-len", "8", "--batch-size", "4", "--rows", "documents")
    assert Plan.from_json(json.loads(done.stdout)).to_json()["rows"] == {
        "documents": {"block_documents": 2**18}
    }
    assert run("import", "megatron", blend).returncode == 2
    blend.write_bytes(b"\xff\xfe")
    done = run("import", "megatron", blend)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {blend} is not UTF-8 text")
