"""A plan as a file that people exchange: saved on one server, loaded on another; by file, HTTP and Hub."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_client import CorpusLoader, errors
from tests.corpora import some_tokens, write_raw
from tests.hub import Hub
from tests.serving import ROOT, RunningServer, environment, run_here

PLAN: dict[str, Any] = {
    "seq_len": 16,
    "seed": 5,
    "stages": [{"global_batch_size": 8, "mixture": {"web": 0.7, "code": 0.3}}],
}
LATER = [
    {"from_step": 9, "global_batch_size": 4, "mixture": {"web": 1, "math": 1}},
    {"from_step": 12, "global_batch_size": 8, "mixture": {"web": 1}, "exclude": {"web": [[0, 100]]}},
]
ADDRESS = "https://data.example/code.bin"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("corpora")
    names = enumerate(("web", "code", "math", "other"))
    return {name: write_raw(folder / f"{name}.bin", some_tokens(4000, seed=seed)) for seed, name in names}


@pytest.fixture(scope="module")
def first(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose owner says where `code` can be had."""
    named: dict[str, Any] = {name: paths[name] for name in ("web", "math")}
    named["code"] = f"{paths['code']},address={ADDRESS},license=mit"
    with RunningServer(named, tmp_path_factory.mktemp("first")) as server:
        yield server


@pytest.fixture(scope="module")
def second(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Another server with the same corpora."""
    named = {name: paths[name] for name in ("web", "code", "math")}
    with RunningServer(named, tmp_path_factory.mktemp("second")) as server:
        yield server


@pytest.fixture(scope="module", params=["plan", "chain"])
def saved(
    request: pytest.FixtureRequest, first: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A file of a plan, or of one that continues another by two stages."""
    plan_id = first.post_plan(PLAN).json()["id"]
    if request.param == "chain":
        plan_id = first.post_plan({"parent": plan_id, "stages": LATER}).json()["id"]
    shown = run_here("plans", "save", plan_id, first.url)
    assert (shown.returncode, shown.stderr) == (0, "")
    path = tmp_path_factory.mktemp("saved") / "run.json"
    path.write_text(shown.stdout)
    assert json.loads(shown.stdout)["id"] == plan_id
    return path


def batch(server: RunningServer, plan_id: str, step: int) -> bytes:
    response = server.get("/v1/batches", plan=plan_id, step=step)
    assert response.status == 200, response.body
    return response.body


def same_plan(saved: Path, first: RunningServer, second: RunningServer) -> None:
    plan_id = json.loads(saved.read_text())["id"]
    for step in (0, 9, 30):
        assert batch(first, plan_id, step) == batch(second, plan_id, step)


def test_a_file_makes_the_same_plan_on_another_server(
    saved: Path, first: RunningServer, second: RunningServer
) -> None:
    """It says what the corpora are and, as far as the first server knows, where they can be had."""
    file = json.loads(saved.read_text())
    assert file["corpora"]["code"] == {
        "fingerprint": first.get("/v1/corpora/code").json()["fingerprint"],
        "num_tokens": 4000,
        "tokenizer_identity": None,
        "address": ADDRESS,
        "license": "mit",
    }
    assert file["corpora"]["web"]["address"] is None
    loaded = run_here("plans", "load", saved, second.url)
    assert (loaded.returncode, loaded.stdout.strip()) == (0, file["id"]), loaded.stderr
    same_plan(saved, first, second)
    again = json.loads(run_here("plans", "save", file["id"][:12], second.url).stdout)
    assert {name: again[name] for name in ("id", "plan", "links")} == {
        name: file[name] for name in ("id", "plan", "links")
    }


def test_a_plan_is_loaded_by_http(saved: Path, first: RunningServer, second: RunningServer) -> None:
    """From any web server, and from a corpus server itself."""
    plan_id = json.loads(saved.read_text())["id"]

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(saved.parent))

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        thread = threading.Thread(target=web.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{web.server_address[1]}"
        loaded = run_here("plans", "load", f"{url}/run.json", second.url, "--json")
        missing = run_here("plans", "load", f"{url}/nothing.json", second.url)
        web.shutdown()
        thread.join()
    assert json.loads(loaded.stdout)["id"] == plan_id, loaded.stderr
    assert missing.returncode == 2
    assert "404" in missing.stderr
    from_server = run_here("plans", "load", f"{first.url}/v1/plans/{plan_id}/file", second.url)
    assert from_server.stdout.strip() == plan_id, from_server.stderr


def test_a_plan_is_loaded_from_the_hub_and_its_corpus_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved by a server of a corpus from there: the address has commit and split, the card the license."""
    pytest.importorskip("huggingface_hub")
    tokens = np.arange(3000, dtype="<u2").tobytes()
    data = {"data/web_train_0.bin": tokens, "data/web_val_0.bin": tokens[:2000]}
    hub = Hub({"datasets/org/web": {"main": data}, "datasets/org/plans": {"main": {"a.json": b"{}"}}})
    hub.licenses["datasets/org/web"] = "odc-by"
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    with hub:
        for name, value in hub.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)

        def run(*arguments: object) -> subprocess.CompletedProcess[str]:
            # The library reads its environment when it is imported.
            command = [sys.executable, "-m", "corpus_server", *map(str, arguments)]
            return subprocess.run(
                command, capture_output=True, text=True, cwd=ROOT, env=environment(), check=False
            )

        made = run(
            "plans", "make", _wish(tmp_path, "web"), "--corpus", "web=hf://datasets/org/web/data#train"
        )
        assert made.returncode == 0, made.stderr
        document = json.loads(made.stdout)
        corpora = {"web": "hf://datasets/org/web/data#train"}
        with RunningServer(corpora, tmp_path / "one") as one:
            plan_id = one.post_plan(document).json()["id"]
            file = run("plans", "save", plan_id, one.url).stdout
        commit = hub.commit("datasets/org/web")
        address = f"hf://datasets/org/web@{commit}/data#train"
        assert json.loads(file)["corpora"]["web"]["address"] == address
        assert json.loads(file)["corpora"]["web"]["license"] == "odc-by"
        hub.repositories["datasets/org/plans"]["main"] = {"runs/run.json": file.encode()}
        where = "hf://datasets/org/plans/runs/run.json"
        with RunningServer({"web": address}, tmp_path / "two") as two:
            loaded = run("plans", "load", where, two.url)
            assert loaded.stdout.strip() == plan_id, loaded.stderr
        with RunningServer(
            {"web": write_raw(tmp_path / "o.bin", some_tokens(3000))}, tmp_path / "three"
        ) as three:
            refused = run("plans", "load", where, three.url)
        assert refused.returncode == 2
        assert json.loads(file)["corpora"]["web"]["fingerprint"] in refused.stderr
        assert f"corpus-server serve 'web={address}' (license odc-by)" in refused.stderr
        absent = run("plans", "load", "hf://datasets/org/plans/run.json", one.url)
        assert "runs/run.json" in absent.stderr


def _wish(folder: Path, corpus: str) -> Path:
    path = folder / "wish.json"
    stages = [{"global_batch_size": 8, "epochs": {corpus: 2}}]
    path.write_text(json.dumps({"seq_len": 16, "stages": stages}))
    return path


def test_a_server_that_lacks_corpora_refuses_with_where_they_can_be_had(
    saved: Path, paths: dict[str, Path], tmp_path: Path
) -> None:
    """Another content under the name, no such name, and the right content under another name."""
    corpora = {"code": paths["other"], "sums": paths["math"], "web": paths["web"]}
    is_chain = bool(json.loads(saved.read_text())["links"])
    with RunningServer(corpora, tmp_path) as server:
        refused = run_here("plans", "load", saved, server.url)
        assert server.get("/v1/plans").json()["num_plans"] == 0
    assert (refused.returncode, refused.stdout) == (2, "")
    said = " ".join(refused.stderr.split())
    fingerprints = {
        name: each["fingerprint"] for name, each in json.loads(saved.read_text())["corpora"].items()
    }
    assert f"'code' ({fingerprints['code']}, 4,000 tokens): the server has other content" in said
    assert f"corpus-server serve code={ADDRESS} (license mit)" in said
    assert "'web'" not in said
    assert ("it is served as 'sums': serve it as 'math'" in said) == is_chain


def test_a_loader_takes_the_file(saved: Path, second: RunningServer) -> None:
    """The same plan, with all stages that continue it."""
    with CorpusLoader(second.url, plan=saved, device="cpu") as loader:
        assert loader.plan_id == json.loads(saved.read_text())["id"]
        assert next(loader).step == 0


def test_a_state_folder_saves_what_it_knows(
    saved: Path, first: RunningServer, second: RunningServer, tmp_path: Path
) -> None:
    """Not where corpora can be had, which a line says; another server takes the file all the same."""
    file = json.loads(saved.read_text())
    shown = run_here("plans", "save", file["id"][:10], "--state-dir", first.state_dir)
    assert "does not say where the corpora can be had" in shown.stderr
    assert json.loads(shown.stdout) == {**file, "corpora": {}}
    bare = tmp_path / "bare.json"
    bare.write_text(shown.stdout)
    assert run_here("plans", "load", bare, second.url).stdout.strip() == file["id"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "0" * 64}, "the plan is not that of its id"),
        ({"version": 2}, "this release reads 1"),
        ({"links": 3}, "links a list"),
        ({"plan": {"seq_len": 16}}, "plan lacks stages"),
        ({"plan": PLAN}, "no fingerprint of code, web"),
    ],
)
def test_a_file_that_is_none_is_refused(
    saved: Path, second: RunningServer, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(json.loads(saved.read_text()) | change))
    refused = run_here("plans", "load", path, second.url)
    assert refused.returncode != 0
    assert message in " ".join(refused.stderr.split())
    assert refused.stderr.startswith(f"error: {path}: ")


def test_a_text_that_is_no_plan_is_named(second: RunningServer, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("{")
    refused = run_here("plans", "load", path, second.url)
    assert refused.stderr.startswith(f"error: {path}: the text must be a plan document in JSON: ")


def test_a_changed_seed_is_found(saved: Path, second: RunningServer, tmp_path: Path) -> None:
    file = json.loads(saved.read_text())
    file["plan"]["seed"] += 1
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(file))
    assert "the plan is not that of its id" in " ".join(
        run_here("plans", "load", path, second.url).stderr.split()
    )


@pytest.mark.parametrize(
    ("where", "message"),
    [("/nowhere.json", "No such file"), ("http://127.0.0.1:9/run.json", "check the address")],
)
def test_a_file_that_is_not_there_is_named(second: RunningServer, where: str, message: str) -> None:
    refused = run_here("plans", "load", where, second.url)
    assert refused.returncode != 0
    assert message in refused.stderr


def test_inspect_says_where_a_corpus_can_be_had(paths: dict[str, Path]) -> None:
    shown = run_here("inspect", f"{paths['web']},address={ADDRESS},license=odc-by").stdout
    assert ADDRESS in shown
    assert "odc-by" in shown
    assert "license" not in run_here("inspect", paths["web"]).stdout


@pytest.mark.parametrize(
    "option", ["address=web.bin", "address=https://me:secret@data.example/web", "license=" + "x" * 300]
)
def test_an_address_is_a_url_without_a_password(paths: dict[str, Path], option: str) -> None:
    refused = run_here("inspect", f"{paths['web']},{option}")
    assert refused.returncode == 2
    assert option.partition("=")[0] in refused.stderr


def test_a_plan_with_a_field_given_twice_is_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"seq_len": 16, "seed": 1, "seed": 2, "stages": []}')
    with pytest.raises(errors.InvalidArgument, match="'seed' is given twice"):
        CorpusLoader("http://127.0.0.1:1", plan=path, device="cpu")
