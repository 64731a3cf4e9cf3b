"""The command line as a person or a script meets it: exit codes, one clear line, JSON."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from corpus_server import __version__
from tests.conftest import ServedCorpus
from tests.corpora import some_tokens, write_raw
from tests.recorded import Record, write_part
from tests.serving import ROOT, RunningServer, command, environment, run_here


def run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end in a process of its own."""
    env = environment(**{"XDG_STATE_HOME": "/nonexistent", **variables})
    return subprocess.run(command(*arguments), capture_output=True, text=True, env=env, check=False)


def test_help_names_every_command_and_succeeds() -> None:
    assert run("--version").stdout == f"corpus-server {__version__}\n"
    said = run("--help")
    assert said.returncode == 0
    names = ("serve", "inspect", "verify", "index", "build", "merge", "plans")
    assert all(name in said.stdout for name in names)


def options_in(help_text: str) -> set[str]:
    """Return the names of options that a help shows, as they stand there."""
    return set(re.findall(r"--[a-z][a-z-]*", help_text))


@pytest.mark.parametrize("words", [["serve"], ["build"], ["inspect"], ["view", "create"], ["export"]])
def test_a_help_at_80_columns_cuts_no_name(words: list[str]) -> None:
    wide, narrow = (run_here(*words, "--help", COLUMNS=width).stdout for width in ("300", "80"))
    assert "\u2026" not in narrow
    assert options_in(narrow) == options_in(wide) > {"--help"}
    assert max(map(len, narrow.splitlines())) <= 80


@pytest.mark.parametrize("group", [[], ["plans"]])
def test_a_question_that_is_no_command_names_its_route(group: list[str]) -> None:
    said = run_here(*group, "usage", "http://localhost:8000")
    assert said.returncode == 2
    assert "GET /v1/plans/{plan_id}/usage" in " ".join(said.stderr.replace("│", "").split())


def test_spikes_of_a_folder_without_losses_say_where_losses_are(tmp_path: Path) -> None:
    empty = run_here("spikes", tmp_path)
    assert empty.returncode == 2
    assert "holds no losses that count (give the folder" in empty.stderr
    write_part(tmp_path / "run-17", [Record(3, 0, "web", 2.5)])
    above = run_here("spikes", tmp_path)
    assert above.returncode == 2
    assert f"name one of its recordings: {tmp_path / 'run-17'}" in above.stderr
    beyond = run_here("spikes", tmp_path / "run-17", "--start", "4")
    assert beyond.returncode == 2
    assert "has steps 3 to 3, and none of [4, ...)" in beyond.stderr
    assert run_here("spikes", tmp_path / "nowhere").returncode == 2


def test_lines_reach_a_pipe_while_a_terminal_shows_the_bar(tmp_path: Path) -> None:
    """`export ... > file` at a terminal: standard output is a file, standard error the terminal."""
    path = write_raw(tmp_path / "web.bin", some_tokens(500))
    plan = tmp_path / "plan.json"
    stages = [{"global_batch_size": 4, "mixture": {"web": 1}}]
    plan.write_text(json.dumps({"seq_len": 16, "stages": stages}))
    ours, terminal = pty.openpty()
    with os.fdopen(ours, "rb"):
        done = subprocess.run(
            command("export", path, "--plan", plan, "--step", "0"),
            stdout=subprocess.PIPE,
            stderr=terminal,
            env=environment(TERM="xterm"),
            check=True,
        )
        os.close(terminal)
    rows = [json.loads(line)["row"] for line in done.stdout.splitlines()]
    assert sorted({*rows}) == [0, 1, 2, 3]


def test_inspect_describes_a_folder(corpora: dict[str, ServedCorpus]) -> None:
    said = run_here("inspect", corpora["mixed"].path)
    assert (said.returncode, said.stderr) == (0, "")
    for part in ("mixed", "1,934 (uint32)", "no index", "sampled-", "llm.c", "0.bin", "2.npy", "901"):
        assert part in said.stdout


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """nanoGPT's folder: 100 tokens of train.bin, 50 of val.bin."""
    folder = tmp_path_factory.mktemp("data") / "owt"
    folder.mkdir()
    write_raw(folder / "train.bin", some_tokens(100))
    write_raw(folder / "val.bin", some_tokens(50, seed=1))
    return folder


@pytest.mark.parametrize(
    "words", [["inspect"], ["verify"], ["index"], ["serve", "--port", "0"]], ids=" ".join
)
def test_training_and_validation_files_are_no_corpus(splits: Path, words: list[str], tmp_path: Path) -> None:
    said = run_here(*words, f"{splits},eot=0", XDG_STATE_HOME=str(tmp_path))
    assert said.returncode == 2
    assert "its files are of several splits: train (train.bin), val (val.bin)" in said.stderr
    for choice in (f"{splits}#train", f"{splits}#val", f"corpus-server serve {splits} --splits"):
        assert choice in said.stderr


@pytest.mark.parametrize(
    "words", [["inspect"], ["verify"], ["index"], ["view", "create", "--out", "v"]], ids=" ".join
)
def test_a_command_of_one_corpus_says_what_one_is(words: list[str], splits: Path) -> None:
    """A shell makes several arguments of a pattern that is not quoted."""
    said = run_here(*words, splits / "train.bin", splits / "val.bin", COLUMNS="300")
    assert (said.returncode, said.stdout) == (2, "")
    for part in ("takes one corpus", "'shards/*.bin' in quotes", "val.bin"):
        assert part in said.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["view", "create", "web.bin", "--out", "v", "--where", "x", "--where", "y"],
            "--where is given twice",
        ),
        (["inspect", "web.bin", "--json", "--json"], "--json is given twice"),
        (["build", "web.txt", "--out", "o", "--out", "p"], "--out is given twice"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nothing_that_was_said_is_dropped(words: list[str], message: str) -> None:
    said = run_here(*words, COLUMNS="300")
    assert (said.returncode, said.stdout) == (2, "")
    assert message in said.stderr


def test_a_corpus_is_served_under_the_name_that_inspect_shows(splits: Path, tmp_path: Path) -> None:
    texts = [
        f"{splits}#train",
        f"{splits}/v*.bin,token_range=10,50",
        f"{splits}/val.bin,eot=9",
        f"a={splits}#all",
    ]
    shown = [json.loads(run_here("inspect", text, "--json").stdout) for text in texts]
    assert [(each["name"], each["num_tokens"]) for each in shown] == [
        ("owt-train", 100),
        ("owt", 40),
        ("val", 50),
        ("a", 150),
    ]
    assert [each["eot"] for each in shown] == [None, None, 9, None]
    config = f'[corpora.b]\npath = "{splits}"\nexclude = ["v*"]\ntoken_range = [0, 7]\n'
    with RunningServer({}, tmp_path, config=config, arguments=texts) as server:
        described = server.get("/v1/corpora").json()["corpora"]
    for each in shown:
        del each["inspected"]  # what only inspect says
    assert [each for each in described if each["name"] != "b"] == shown
    assert [each["num_tokens"] for each in described if each["name"] == "b"] == [7]


def test_a_package_that_is_missing_is_named_at_start(splits: Path, tmp_path: Path) -> None:
    """And not at the first request for text."""
    (tmp_path / "tokenizers.py").write_text("raise ImportError('not here')")
    (tmp_path / "tokenizer.json").write_text("{}")
    corpus = f"{splits}#train,tokenizer={tmp_path / 'tokenizer.json'}"
    ended = subprocess.run(
        command("serve", corpus, "--port", "0"), capture_output=True, text=True, check=False,
        env=environment(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)])),
    )  # fmt: skip
    assert ended.returncode == 2
    assert "tokenizer.json needs the package 'tokenizers', which is not installed" in ended.stderr
    assert "pip install 'corpus-server[text]'" in ended.stderr


def test_inspect_says_why_a_file_is_what_and_what_is_left_out(tmp_path: Path) -> None:
    write_raw(tmp_path / "token_ids_part_0.npy", [72, 105, 10, 256] * 5)
    write_raw(tmp_path / "labels_mask_part_0.npy", [1] * 20, dtype="uint8")
    (tmp_path / "notes.md").touch()
    said = run_here("inspect", f"{tmp_path},tokenizer=bytes", "--seq-len", "6", "--json")
    described = json.loads(said.stdout)["inspected"]
    assert described["reasons"]["token_ids_part_0.npy"].startswith("named .npy, without the NPY header")
    assert described["sample"] == {"num_tokens": 20, "smallest": 10, "largest": 256}
    assert described["windows"] == {"seq_len": 6, "num_windows": 3, "num_tokens_dropped": 1}
    assert described["other_files"] == {"notes.md": "no tokens"}
    without = json.loads(run_here("inspect", f"{tmp_path},mask=no", "--json").stdout)["inspected"]
    assert without["other_files"]["labels_mask_part_0.npy"] == "a loss mask of OLMo"
    assert "holds token 256, which its tokenizer (bytes) does not know" in described["text"]
    assert "holds token 256, but the ids of its tokenizer (bytes) are below 256" in said.stderr
    shown = run_here("inspect", f"{tmp_path},tokenizer=bytes,token_range=0,3", "--seq-len", "6")
    assert shown.stderr == ""
    for part in (
        "1 x olmo: named .npy",
        "105 among 3 sampled tokens",
        "3 tokens at the ends",
        "loss masks for 1 of 1 shard;",
        "notes.md (no tokens)",
        "Hi",
    ):
        assert part in " ".join(shown.stdout.split())


def test_verify_records_confirms_and_finds_damage(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", some_tokens(5000))
    assert "no hashes are recorded" in run_here("verify", path).stdout
    recorded = json.loads(run_here("verify", path, "--record", "--json").stdout)
    assert recorded["fingerprints"]["full"].startswith("full-")
    confirmed = run_here("verify", path, "--json")
    assert (confirmed.returncode, json.loads(confirmed.stdout)["ok"]) == (0, True)
    with path.open("r+b") as file:
        file.seek(4000)
        file.write(b"\xff\xff")
    damaged = run_here("verify", path)
    assert damaged.returncode == 1
    assert "a.bin, block 0, tokens [0, 5000)" in damaged.stdout
    as_json = run_here("verify", path, "--json")
    assert (as_json.returncode, json.loads(as_json.stdout)["ok"]) == (1, False)


def test_index_warns_of_an_id_that_occurs_nowhere(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", [1, 2, 3])
    done = run_here("index", f"{path},eot=0")
    assert done.returncode == 0
    assert "token 0 occurs nowhere: is it the right id?" in done.stderr
    again = json.loads(run_here("index", f"{path},eot=0", "--json").stdout)
    assert (again["found_nowhere"], again["num_documents"], again["shards"][0]["action"]) == (True, 1, "kept")


def test_index_mistakes_are_one_clear_line(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "a.bin", [1, 2, 3])
    for corpus, message in (
        (path, f"the id of the end-of-text token is missing (corpus-server index {path},eot=ID)"),
        (f"{path},dtype=uint8", f"(corpus-server index {path},dtype=uint8,eot=ID)"),
        (f"{tmp_path}#other", f"(corpus-server index '{tmp_path}#other',eot=ID)"),
        (f"{path},eot=65536", "eot must be a token id in [0, 65535] (uint16 tokens), got 65536"),
        (f"{path},eot=x", "eot must be an id, 0 or more, got 'x'"),
        (f"{path},eto=0", "unknown eto; known are address, dtype, earlier, eot, eot_at, exclude,"),
        (tmp_path / "none,eot=0", "found nothing"),
    ):
        said = run_here("index", corpus)
        assert (said.returncode, said.stdout) == (2, "")
        assert message in said.stderr
        assert "Traceback" not in said.stderr


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell's background job ignores SIGINT, and so would the processes it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_indexing_is_no_traceback_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(20 * 10**9)  # holes: takes half a minute to read and no space
    with subprocess.Popen(
        command("index", f"{path},eot=1"), stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        deadline = time.monotonic() + 30
        while not (tmp_path / ".large.bin.documents.tmp").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode not in (0, None)
    assert "Traceback" not in said
    assert [entry.name for entry in tmp_path.iterdir()] == ["large.bin"]


def bad_llmc(folder: Path) -> list[str | Path]:
    header = b"\x88\xd8\x34\x01" + b"\x01\0\0\0" + b"\x0c\0\0\0" + bytes(1012)
    (folder / "cut.bin").write_bytes(header + bytes(20))
    return [folder / "cut.bin"]


def good(*more: str) -> Callable[[Path], list[str | Path]]:
    return lambda folder: [write_raw(folder / "a.bin", [1, 2, 3]), *more]


def state_dir_is_a_file(folder: Path) -> list[str | Path]:
    (folder / "state").touch()
    return [*good("--port", "0")(folder), "--state-dir", folder / "state"]


def empty_folder(folder: Path) -> list[str | Path]:
    (folder / "empty").mkdir()
    return [folder / "empty"]


def link_to_itself(folder: Path) -> list[str | Path]:
    (folder / "link").symlink_to("link")
    return [folder / "link"]


def named_pipes(folder: Path) -> list[str | Path]:
    os.mkfifo(folder / "k.pem")
    return good("--tls-certificate", str(folder / "k.pem"), "--tls-key", str(folder / "k.pem"))(folder)


MISTAKES: list[tuple[str, Callable[[Path], list[str | Path]], str]] = [
    ("nothing", lambda folder: [], "no corpus to serve"),
    ("missing", lambda folder: [folder / "none"], "found nothing"),
    ("empty-folder", empty_folder, "expected token files in the folder"),
    ("damaged", bad_llmc, "cut.bin"),
    ("link-to-itself", link_to_itself, "found nothing"),
    (
        "state-dir-of-nobody",
        good("--port", "0", "--state-dir", "~nobody-has-this-name/s", "--workers", "0"),
        "workers",
    ),
    ("device", lambda folder: [Path("/dev/null")], "regular file"),
    ("name", lambda folder: [f"a b={folder}"], "corpus name 'a b'"),
    ("same-name", lambda folder: [*good()(folder), *good()(folder)], "two corpora are named 'a'"),
    ("tokenizer", lambda folder: [f"{good()(folder)[0]},tokenizer=/no"], "/no: the tokenizer cannot be read"),
    ("port-text", good("--port", "http"), "Invalid value for '--port'"),
    (
        "host",
        good("--host", "none.invalid", "--port", "0", "--allow-anyone"),
        "cannot listen on host none.invalid, port 0",
    ),
    (
        "host-unknown",
        good("--host", "nosuch.invalid", "--port", "0"),
        "nosuch.invalid is no address, and no name",
    ),
    ("host-no-name", good("--host", "a..b", "--port", "0", "--allow-anyone"), "cannot listen on host a..b"),
    ("no-tokens", good("--host", "0.0.0.0", "--port", "0"), "--allow-anyone"),
    ("tls-pipe", named_pipes, "expected a regular file, found a named pipe"),
    ("root", lambda folder: ["/none-has-this-name*/x.bin"], "matches no token file"),
    ("option", good("--prot", "1"), "No such option: --prot"),
    ("no-config", lambda folder: ["--config", folder / "none.toml"], "none.toml.* does not exist"),
    ("state-dir", state_dir_is_a_file, "state_dir .* cannot be written"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), [pytest.param(*mistake, id=name) for name, *mistake in MISTAKES]
)
def test_a_mistake_is_one_clear_line_and_no_server(
    tmp_path: Path, arguments: Callable[[Path], list[str | Path]], message: str
) -> None:
    """Catalogue row 11: no traceback and no restart loop."""
    said = run("serve", "--port", "0", *arguments(tmp_path), XDG_STATE_HOME=str(tmp_path))
    assert said.returncode == 2
    assert "Traceback" not in said.stderr
    assert len([line for line in said.stderr.splitlines() if re.search(message, line)]) == 1, said.stderr
    assert "is ready" not in said.stderr


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_in_use_ends_the_server(tmp_path: Path, workers: str) -> None:
    path = write_raw(tmp_path / "a.bin", some_tokens(100))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        state = tmp_path / "state"
        said = run("serve", path, "--port", port, "--workers", workers, "--state-dir", state, COLUMNS="20")
    assert said.returncode not in (0, None)
    assert f"cannot listen on host 127.0.0.1, port {port}: Address already in use" in said.stderr
    assert "Traceback" not in said.stderr
    assert "is ready" not in said.stderr


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(corpora: dict[str, ServedCorpus], tmp_path: Path, closed: str) -> None:
    """What is opened later does not take the place of a stream, and is not written to."""
    asked = command("inspect", corpora["web"].path)
    line = f'"$@" {closed} 2> {tmp_path / "said"}' if closed == ">&-" else f'"$@" {closed}'
    ended = subprocess.run(
        ["sh", "-c", line, "sh", *asked], env=environment(), check=False, stderr=subprocess.PIPE, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert not (tmp_path / "said").exists() or not (tmp_path / "said").read_text()


@pytest.mark.parametrize(
    "arguments", [("inspect",), ("inspect", "--json"), ("verify",), ("inspect", "--stats")], ids=" ".join
)
def test_names_that_are_no_text_are_shown_and_a_full_output_is_one_line(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "c").mkdir()
    write_raw(tmp_path / "c" / os.fsdecode(b"\xff.bin"), some_tokens(50))
    said = run(*arguments, tmp_path / "c")
    assert (said.returncode, said.stderr) == (0, "")
    if arguments[0] == "inspect":
        assert r"\udcff.bin" in said.stdout
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            command(*arguments, tmp_path / "c"), stdout=full, stderr=subprocess.PIPE, text=True,
            env=environment(), check=False,
        )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (
        2,
        "error: reading or writing failed: No space left on device\n",
    )
