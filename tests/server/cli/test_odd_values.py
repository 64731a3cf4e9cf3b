"""Values that no command can use end it with one sentence: nothing is written, and no library speaks."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.corpora import some_tokens, write_raw
from tests.serving import command, environment, run_here

HUGE = "99999999999999999999"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a built corpus of documents that have metadata, and token files."""
    folder = tmp_path_factory.mktemp("built")
    records = (json.dumps({"text": f"hello world {number}", "score": number}) for number in range(9))
    (folder / "texts.jsonl").write_text("\n".join(records))
    words = ("--tokenizer", "bytes", "--keep", "score", "--out", folder / "corpus")
    assert run_here("build", folder / "texts.jsonl", *words).returncode == 0
    write_raw(folder / "web.bin", some_tokens(500))
    return folder


@pytest.fixture
def here(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a copy of it the current folder."""
    for each in built.iterdir():
        if each.is_dir():
            shutil.copytree(each, tmp_path / each.name)
        else:
            shutil.copy2(each, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)


def refused(*words: str | Path) -> str:
    """Run a command that is refused, and return the one line that it says."""
    before = sorted(Path.cwd().rglob("*"))
    done = run_here(*words)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert sorted(Path.cwd().rglob("*")) == before
    assert done.stderr.startswith("error: ")
    assert (done.stderr.count("\n"), "Errno" in done.stderr) == (1, False)
    return done.stderr


BUILD = ("build", "texts.jsonl", "--tokenizer", "bytes", "--out")
VIEW = ("view", "create", "corpus", "--out")
FIND = ("find", "corpus", "--text", "hello", "-n", "5")
DENY, REPORT = (*FIND, "--deny"), (*FIND, "--out")


@pytest.mark.parametrize("words", [BUILD, VIEW, DENY], ids=lambda words: f"{words[0]} {words[-1]}")
@pytest.mark.parametrize("out", [".", "/", "..", "web.bin/x", "corpus", "pipe", "n" * 300])
def test_a_place_where_nothing_can_be_written_is_named(here: None, words: tuple[str, ...], out: str) -> None:
    said = refused(*words, out)
    assert f"{out} " in said or f"{out}: " in said or f"{out}." in said or f"'{out}'" in said


@pytest.mark.parametrize("words", [VIEW, DENY], ids=lambda words: words[0])
def test_what_exists_is_not_replaced(here: None, words: tuple[str, ...]) -> None:
    """A shard that is read, by its name and by a link; a file of somebody else; a link that leads nowhere."""
    Path("link").symlink_to("corpus/000000.npy")
    Path("broken").symlink_to("nowhere")
    for out in ("corpus/000000.npy", "link", "texts.jsonl", "broken"):
        before = Path(out).lstat().st_ino, Path(out).lstat().st_mtime_ns
        assert refused(*words, out) == f"error: {out} exists; name another file, or remove it\n"
        assert (Path(out).lstat().st_ino, Path(out).lstat().st_mtime_ns) == before


def test_a_list_is_refused_before_the_pass(here: None) -> None:
    """Not after hours: a report would be there already."""
    assert "texts.jsonl exists" in refused(*DENY, "texts.jsonl", "--out", "report")


@pytest.mark.parametrize("name", ["report.json", "report.md", "report.html"])
def test_files_of_others_are_not_replaced_by_a_report(here: None, name: str) -> None:
    Path("mine").mkdir()
    Path("mine", name).write_text("{}\n")
    assert refused(*REPORT, "mine") == (
        f"error: mine/{name} exists, and find did not write it; name another folder, or remove it\n"
    )


def test_a_report_is_replaced_by_the_next_one_of_its_folder(here: None) -> None:
    for text in ("hello", "world"):
        assert run_here("find", "corpus", "--text", text, "-n", "5", "--out", "report").returncode == 0
        assert text in Path("report/report.md").read_text()


@pytest.mark.parametrize(
    "words",
    [
        ("a.txt", "--text-field", "body"),
        ("a.txt?text=body", "texts.jsonl"),
        ("texts.jsonl?text=text", "a.txt", "--text-field", "body"),
    ],
    ids=" ".join,
)
def test_a_field_of_plain_text_is_refused(here: None, words: tuple[str, ...]) -> None:
    Path("a.txt").write_text("hello world")
    said = refused("build", *words, "--tokenizer", "bytes", "--out", "new")
    assert said.startswith("error: no field 'body' is read: ")
    assert "a.txt is plain text; leave it out (--text-field, ?text=, or --field of find)" in said
    said = refused("find", "corpus", "--items", "a.txt", "--field", "body")
    assert said.startswith("error: no field 'body' is read: ")


def test_a_field_of_text_is_refused_where_no_text_is_read(here: None) -> None:
    words = ("--text-field", "body", "--column", "ids", "--eot", "0", "--out", "new")
    assert "no field 'body' is read: documents are in 'ids'" in refused("build", "texts.jsonl", *words)


def test_a_field_of_some_files_is_read(here: None) -> None:
    """Where plain text stands beside files that have the field, it has an effect."""
    Path("a.txt").write_text("hello world")
    Path("b.jsonl").write_text('{"body": "hello"}')
    words = ("--text-field", "body", "--tokenizer", "bytes", "--out", "new")
    assert run_here("build", "a.txt", "b.jsonl", *words).returncode == 0


@pytest.mark.parametrize("out", ["web.bin", "web.bin/x"])
def test_a_report_that_can_have_no_folder_is_refused(here: None, out: str) -> None:
    assert f"{out} cannot be written: " in refused(*REPORT, out)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((*BUILD, ""), "--out"),
        ((*VIEW, ""), "--out"),
        ((*VIEW, "v", "--where="), "--where"),
        ((*REPORT, ""), "--out"),
        (("plans", "list", "--state-dir", ""), "--state-dir"),
        (("serve", "web.bin", "--state-dir="), "--state-dir"),
        (("inspect", ""), "an argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_an_empty_value_is_named(here: None, words: tuple[str, ...], name: str) -> None:
    assert f"{name} is empty; give it a value, or leave it out" in refused(*words)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((*FIND, "--places"), "--places"),
        (("plans", "list", "--limit"), "--limit"),
        (("export", "web.bin", "--plan", "0123", "--step"), "--step"),
        (("what", "-", "--step", "0", "--count"), "--count"),
        (("plans", "import", "megatron", "-", "--seed"), "--seed"),
        (("serve", "web.bin", "--port"), "--port"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else None,
)
def test_a_number_beyond_64_bits_is_refused(here: None, words: tuple[str, ...], name: str) -> None:
    said = refused(*words, HUGE)
    assert f"error: {name} must be at most 9223372036854775807 (2^63 - 1), got {HUGE}" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (" ", "--where: expected one expression, and neither none nor several"),
        ("score, 1", "--where: expected one expression, and neither none nor several"),
        (
            "points > 1",
            "no column is called 'points'; expected a column of the metadata (score) or num_tokens",
        ),
        ("score > 'much'", "--where: DuckDB says: Conversion Error"),
        ("a\udcff", "expected text in UTF-8, got 'a\\udcff'"),
    ],
)
def test_an_expression_that_says_nothing_of_documents_is_refused(here: None, text: str, said: str) -> None:
    assert said in refused(*VIEW, "v", "--where", text)


def test_lengths_and_qualified_names_are_columns(here: None) -> None:
    done = run_here(*VIEW, "v", "--where", "documents.score > 3 AND NUM_TOKENS > 1", "--json")
    assert json.loads(done.stdout)["num_chosen"] == 5


def test_index_names_the_id_of_the_sidecars_that_occurs_nowhere(here: None) -> None:
    run_here("index", "web.bin,eot=60000")
    assert "token 60000 occurs nowhere" in run_here("index", "web.bin").stderr


def test_a_plan_that_is_none_is_named_once(here: None) -> None:
    said = refused("stage", "web=web.bin", "--plan", "none.json", "--steps", "0:2")
    assert "none.json is no plan: No such file or directory" in said


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16", "utf-32"])
def test_a_text_of_whole_characters_alone_is_said_to_be_utf16(here: None, encoding: str) -> None:
    Path("cut.txt").write_bytes("hello".encode(encoding)[:-1])
    name = encoding.upper().replace("-LE", "LE")
    said = refused("build", "cut.txt", "--tokenizer", "bytes", "--out", "o")
    assert f"cut.txt: looks like {name} that ends inside a character; was the copy interrupted?" in said


IN_READ_ONLY = [
    *("unshare", "-rm", "sh", "-c"),
    'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"',
]


@pytest.mark.skipif(
    subprocess.run(
        [*IN_READ_ONLY, Path(__file__).parent, "true"], capture_output=True, check=False
    ).returncode
    != 0,
    reason="no file system can be mounted here",
)
def test_digests_of_metadata_that_cannot_be_written_are_named(here: None) -> None:
    words = [*IN_READ_ONLY, "corpus", *command("verify", "--record", "corpus")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "documents: the digest of the metadata cannot be written: Read-only file system" in done.stderr


IN_READ_ONLY_SHM = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o ro none /dev/shm && exec "$@"', "sh"]


@pytest.mark.skipif(
    subprocess.run([*IN_READ_ONLY_SHM, "true"], capture_output=True, check=False).returncode != 0,
    reason="no file system can be mounted here",
)
def test_a_folder_of_locks_that_cannot_be_written_is_named(here: None) -> None:
    words = [*IN_READ_ONLY_SHM, *command(*BUILD, "new")]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: the build needs /dev/shm for the locks of its processes, which cannot be made: Read-only "
        "file system (let this user write to /dev/shm, and make room there)\n"
    )


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """Yield the address of a server that answers each question alike."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_another_program_at_the_address_is_not_taken_for_none(here: None) -> None:
    with answering(b"<html>hello</html>") as url:
        said = refused("plans", "list", url)
    assert f"{url} answered HTTP 200 without JSON (does a corpus-server answer there" in said
