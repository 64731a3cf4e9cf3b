"""`find` as people use it: what it is asked for, what it tells, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.errors import CorpusServerError
from corpus_server.tools.finding import Items, Wanted, opened
from tests.corpora import some_tokens, spec, write_raw
from tests.serving import RunningServer, command, environment, run_here

SENTENCE = "the quick brown fox jumps over the lazy dog and runs away from all the cats of this town"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of bytes, to be copied: five documents, the fourth of which is hostile."""
    folder = tmp_path_factory.mktemp("built")
    documents = [
        "What is the capital of the old kingdom by the sea? " + SENTENCE,
        SENTENCE[::-1],
        "Nothing to see.",
        "*a* [b](http://c) www.d.e <script>alert(1)</script> | `rm -rf` | \u202e<img src=x onerror=alert(2)> "
        + "x" * 30,
        "Again: What is the capital of the old kingdom by the sea?",
    ]
    lines = "".join(json.dumps({"text": each}) + "\n" for each in documents)
    (folder / "web.jsonl").write_text(lines)
    made = run_here(
        "build", folder / "web.jsonl", "--tokenizer", "bytes", "--eot", "0", "--out", folder / "web"
    )
    assert made.returncode == 0, made.stderr
    return folder / "web"


@pytest.fixture
def web(built: Path, tmp_path: Path) -> Path:
    """A copy of the test's own, because a build takes half a second of CPU."""
    return Path(shutil.copytree(built, tmp_path / "web"))


def test_the_way_from_a_benchmark_to_a_corpus_without_it(web: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    rows = [
        {
            "question": "What is the capital of the old kingdom by the sea?",
            "choices": ["Ys", "a lazy dog and runs"],
        },
        {"question": "Which of these is nowhere to be found at all?", "choices": ["none", "of them"]},
        {"question": "short", "choices": []},
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("find", web, "-n", "13", "--items", questions, "--field", "question")
    arguments = (*arguments, "--field", "choices", "--json")
    done = run_here(*arguments, "--deny", tmp_path / "deny.txt", "--out", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (corpus,) = report["corpora"]
    assert (report["num_items"], corpus["num_items_found"], corpus["num_items_too_short"]) == (3, 1, 1)
    (item,) = report["items"]
    # The question, and " lazy dog and runs" of a choice: another text of the same item.
    assert (item["num_tokens"], item["num_covered"]) == (71, 50 + 18)
    assert [(span["num_tokens"], span["documents"]) for span in item["spans"]] == [
        (50, [0]),
        (18, [0]),
        (50, [4]),
    ]
    assert next(part["text"] for part in item["parts"] if part["is_found"]) == rows[0]["question"]
    assert (tmp_path / "deny.txt").read_text() == "0\n4\n"
    with opened([spec(web)]) as (files,):
        assert report["exclude"] == {"web": [[*files.document_range(0)], [*files.document_range(4)]]}
    assert {each.name for each in (tmp_path / "report").iterdir()} >= {
        "report.json",
        "report.md",
        "report.html",
    }
    view = tmp_path / "clean.view"
    made = run_here("view", "create", web, "--without", tmp_path / "deny.txt", "--out", view)
    assert made.returncode == 0, made.stderr


@pytest.mark.parametrize("by", ["tokens", "text"])
def test_documents_that_a_view_leaves_out_are_not_found_in_it(tmp_path: Path, by: str) -> None:
    """After a take-down the question is whether the text is gone; the view has no token of it."""
    phrase = "the same words stand in four documents of this corpus, once in each"
    texts = [f"{number} {phrase} {number}" if number % 2 else f"nothing {number}" for number in range(8)]
    (tmp_path / "web").mkdir()
    np.frombuffer("".join(f"{text}\0" for text in texts).encode(), np.uint8).tofile(tmp_path / "web/0.bin")
    made = run_here("index", f"{tmp_path / 'web'},eot=0,dtype=uint8")
    assert made.returncode == 0, made.stderr
    web = f"web={tmp_path / 'web'},dtype=uint8"
    (tmp_path / "gone.txt").write_text("1\n5\n")
    view = tmp_path / "clean.view"
    made = run_here("view", "create", web, "--without", tmp_path / "gone.txt", "--out", view)
    assert made.returncode == 0, made.stderr
    clean = f"clean={tmp_path / 'web'}?view={view},dtype=uint8"
    deny = tmp_path / "deny.txt"

    def report_of(corpus: str, *texts: str) -> dict[str, Any]:
        arguments = [argument for text in texts for argument in ("--text", text)]
        deny.unlink(missing_ok=True)
        done = run_here("find", corpus, *arguments, "--by", by, "--deny", deny, "--json")
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def documents_of(report: dict[str, Any]) -> list[int]:
        return [each for item in report["items"] for span in item["spans"] for each in span["documents"]]

    only_gone = f"5 {phrase} 5"
    assert documents_of(report_of(web, phrase)) == [1, 3, 5, 7]
    report = report_of(clean, phrase)
    assert documents_of(report) == [3, 7]
    assert report["corpora"][0]["num_documents_found"] == 2
    assert deny.read_text() == "3\n7\n"
    (item,) = report_of(clean, only_gone)["items"]
    assert item["share"] < 1, "its ends stand in a document that the view leaves out alone"
    (tmp_path / "gone.txt").write_text("1\n3\n5\n7\n")
    view.unlink()
    made = run_here("view", "create", web, "--without", tmp_path / "gone.txt", "--out", view)
    assert made.returncode == 0, made.stderr
    report = report_of(clean, phrase)
    assert (report["items"], report["exclude"], deny.read_text()) == ([], {"clean": []}, "")


def test_find_refuses_a_view_of_another_corpus(tmp_path: Path) -> None:
    for name, tokens in (("one", [1, 2, 0, 3, 0]), ("other", [1, 2, 0, 4, 0])):
        (tmp_path / name).mkdir()
        write_raw(tmp_path / name / "0.bin", tokens)
        assert run_here("index", f"{tmp_path / name},eot=0").returncode == 0
    view = tmp_path / "one.view"
    assert run_here("view", "create", tmp_path / "one", "--repeat", "1", "--out", view).returncode == 0
    done = run_here("find", f"x={tmp_path / 'other'}?view={view}", "--tokens", "1,2", "-n", "2")
    assert done.returncode == 2
    assert "is a view of corpus" in done.stderr


def test_text_of_a_corpus_is_never_markup(web: Path, tmp_path: Path) -> None:
    text = (
        "*a* [b](http://c) www.d.e <script>alert(1)</script> | `rm -rf` | \u202e<img src=x onerror=alert(2)> "
    )
    done = run_here("find", web, "-n", "13", "--text", text, "--out", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "report/report.html").read_text()
    assert "<script" not in html
    assert "<img" not in html
    assert "&lt;script&gt;alert(1)" in html
    assert "\u202e" not in html + done.stdout
    markdown = (tmp_path / "report/report.md").read_text()
    assert "<script" not in markdown
    assert r"\| \`rm -rf\` \|" in markdown
    assert r"\*a\* \[b\](http\://c) www\.d.e" in markdown
    assert "default-src 'none'" in html


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "there is no item to look for"),
        (["--text", "too short"], "web: not looked for: 1 item of fewer than 50 tokens"),
        (["--items", "{empty}"], "empty.jsonl: the sources are empty files"),
        (["--items", "{nothing}"], "web: not looked for: 1 item of fewer than 50 tokens"),
        (
            ["--items", "{fields}"],
            "only 'question'; name one of them with --text-field (find: --field)",
        ),
        (["--items", "{damaged}"], "damaged.jsonl: line 1: is not JSON"),
        (["--items", "{number}"], "line 1: expected text in 'text', got 5"),
        (["--items", "{binary}"], "binary.jsonl: line 1"),
        (["--text", "y" * 200_000], "0"),
        (["--tokens", "1,2,x"], "tokens must be ids below 4294967296, as 11,22,33, got '1,2,x'"),
        (["--tokens", "99999999999"], "tokens must be ids below"),
        (["--text", "y" * 20, "--field", "x"], "--field needs --items"),
        (["--text", "y" * 20, "--column", "x"], "--column needs --items"),
        (["--text", "y" * 20, "--include", "*.md"], "--include needs --items"),
        (["--text", "y" * 20, "--state-dir", "/s"], "--state-dir needs --plan"),
        (["--items", "{fields}", "--field", "x", "--column", "y"], "--field and --column"),
        (["--text", "y" * 20, "--plan", "abc"], "--plan needs --before-step"),
        (["--text", "y" * 20, "--before-step", "5"], "--before-step needs --plan"),
        (["--text", "y" * 20, "-n", "1000"], "n must be in [1, 256], got 1000"),
        (["--items", "/nowhere.jsonl"], "/nowhere.jsonl: expected a file, a folder or a pattern"),
    ],
)
def test_what_cannot_be_looked_for_is_one_line(
    web: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    files = {
        "empty": b"",
        "nothing": b'{"text": ""}\n',
        "fields": b'{"question": "a"}\n',
        "damaged": b"no json\n",
        "number": b'{"text": 5}\n',
        "binary": b"\x80\xff\n",
    }
    paths = {name: tmp_path / f"{name}.jsonl" for name in files}
    for name, content in files.items():
        paths[name].write_bytes(content)
    done = run_here("find", web, *(each.format(**paths) for each in arguments))
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert done.returncode == 2
        assert len(done.stderr.strip().splitlines()) == 1


def test_of_bytes_more_must_stand_together(web: Path, tmp_path: Path) -> None:
    """13 of them are two words. Beside a corpus of other tokens it is said."""
    text = "the capital of the old kingdom, not by the sea at all"
    assert "50 tokens of it stand together" in run_here("find", web, "--text", text).stdout
    ids = tmp_path / "ids"
    ids.mkdir()
    write_raw(ids / "c.bin", some_tokens(1000))
    given = ("--tokens", ",".join(map(str, range(13))))
    mixed = run_here("find", web, ids, *given)
    assert "13 tokens of it stand together" in mixed.stdout
    assert "the tokens of corpus 'web' are bytes, and 13 are two words" in " ".join(mixed.stderr.split())
    assert "are bytes" not in run_here("find", web, ids, *given, "-n", "13").stderr


def test_one_of_something_is_no_plural(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"text": "ab"}\n')
    built = run_here(
        "build", tmp_path / "one.jsonl", "--tokenizer", "bytes", "--eot", "0", "--out", tmp_path / "one"
    )
    indexed = run_here("index", tmp_path / "one")
    found = run_here("find", tmp_path / "one", "--text", "a", "-n", "1", "--out", tmp_path / "report")
    assert "1 item; an item is found if 1 token of it stands in a corpus" in found.stdout
    said = "".join(each.stdout + each.stderr for each in (built, indexed, found))
    said += "".join((tmp_path / "report" / name).read_text() for name in ("report.md", "report.html"))
    assert re.findall(r"\b1 (?:\w+ )?(?:items|tokens|documents|places|shards)\b", said) == []
    assert (found.returncode, indexed.returncode) == (0, 0)
    assert indexed.stdout == "1 document in 3 tokens\n  1 shard indexed already\n"


def test_the_figures_of_many_corpora_fit_a_terminal(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "c.bin", some_tokens(1000))
    named = [f"corpus-{number}={path}" for number in range(9)]
    done = run_here("find", *named, "--tokens", ",".join(map(str, range(13))), COLUMNS="80")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line[:1] in "\u250f\u2503\u2502"]
    assert max(map(len, lines)) <= 80
    assert all(f"corpus-{number}" in done.stdout for number in range(9))


def test_a_text_that_holds_end_of_text_reaches_into_no_other_document(tmp_path: Path) -> None:
    """Of bytes U+0000 is end of text."""
    passage = "the passage that somebody wants removed from it"
    documents = [{"text": each} for each in ("first", passage, "last")]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, documents)))
    assert (
        run_here("build", tmp_path / "d.jsonl", "--tokenizer", "bytes", "--out", tmp_path / "d").returncode
        == 0
    )
    (tmp_path / "q.jsonl").write_text(json.dumps({"q": f"st\0{passage}\0last"}))
    deny = tmp_path / "deny.txt"
    asked = run_here(
        *("find", tmp_path / "d", "--items", tmp_path / "q.jsonl", "--field", "q"),
        *("-n", "20", "--deny", deny, "--out", tmp_path / "report"),
    )
    assert asked.returncode == 0, asked.stderr
    assert deny.read_text() == "1\n"
    (found,) = json.loads((tmp_path / "report" / "report.json").read_text())["items"]
    (span,) = found["spans"]
    assert (span["item_start"], span["num_tokens"]) == (3, len(passage))


def test_a_corpus_without_a_tokenizer_takes_token_ids_alone(tmp_path: Path) -> None:
    tokens = some_tokens(1000).tolist()
    folder = tmp_path / "raw"
    folder.mkdir()
    write_raw(folder / "c.bin", tokens)
    done = run_here("find", folder, "--text", "a text of more than thirteen tokens")
    assert done.returncode == 2
    assert "corpus 'raw' has no tokenizer, without which no text is found in it" in done.stderr
    ids = ",".join(map(str, tokens[30:60]))
    report = json.loads(run_here("find", folder, "--tokens", ids, "--json").stdout)
    assert [(each["start"], each["documents"]) for each in report["items"][0]["spans"]] == [(30, [])]
    denied = run_here("find", folder, "--tokens", ids, "--deny", tmp_path / "deny")
    assert denied.returncode == 2
    assert "has no document index" in denied.stderr


def test_too_many_tokens_are_refused_before_the_pass(
    web: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("corpus_server.tools.finding.items.MAX_TOKENS", 1000)
    done = run_here("find", web, "--text", "y" * 1001)
    assert done.returncode == 2
    assert "the items have more than 1,000 tokens" in done.stderr
    assert "another pass" in done.stderr


def test_a_share_leaves_out_what_is_covered_less(web: Path) -> None:
    text = "the capital of the old kingdom, not by the sea at all but somewhere in the hills of another land"
    whole = "What is the capital of the old kingdom by the sea?"
    arguments = ("find", web, "-n", "13", "--text", text, "--text", whole, "--json")
    assert [each["number"] for each in json.loads(run_here(*arguments).stdout)["items"]] == [1, 0]
    report = json.loads(run_here(*arguments, "--share", "0.8").stdout)
    assert [each["number"] for each in report["items"]] == [1]
    assert report["corpora"][0]["num_items_by_share"]["0.5"] == 1
    with pytest.raises(CorpusServerError, match=r"share must be in \[0, 1\]"):
        Wanted(items=Items(), min_share=2)


@pytest.mark.parametrize("before", [1, 7, 23])
@pytest.mark.parametrize("rows", ["windows", "documents"])
def test_the_steps_that_saw_a_span_are_those_whose_rows_hold_it(
    web: Path, tmp_path: Path, rows: str, before: int
) -> None:
    """Against going through the rows of every step of a run that stopped; over three epochs."""
    n = 13
    plan = {
        "seq_len": 31,
        "seed": 5,
        "rows": rows,
        "stages": [{"from_step": 0, "global_batch_size": 2, "mixture": {"web": 1}}],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    texts = [
        "the capital of the old kingdom by",
        "quick brown fox jumps over the lazy",
        "nowhere in the corpus",
    ]
    arguments = [f"web={web}", "--plan", tmp_path / "plan.json"]
    asked = (
        *arguments,
        "-n",
        n,
        "--before-step",
        before,
        *(each for text in texts for each in ("--text", text)),
    )
    done = run_here("find", *asked, "--json", "--out", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    exported = run_here("export", *arguments, "--step", "0", "--count", before)
    assert exported.returncode == 0, exported.stderr
    pieces = [json.loads(line) for line in exported.stdout.splitlines()]
    seen: dict[int, int | None] = {}
    for item in report["items"]:
        for span in item["spans"]:
            expected = [
                each["step"]
                for each in pieces
                if min(each["stop"], span["stop"]) - max(each["start"], span["start"]) >= n
            ]
            assert span["seen"]["steps"] == list(dict.fromkeys(expected)), span
            assert span["seen"]["num_rows"] == len(expected)
        firsts = [span["seen"]["steps"][0] for span in item["spans"] if span["seen"]["steps"]]
        seen[item["number"]] = item["first_step"]
        assert item["first_step"] == min(firsts, default=None)
    assert sorted(seen) == [0, 1]
    (corpus,) = report["corpora"]
    assert corpus["num_items_seen"] == sum(each is not None for each in seen.values())
    assert f"before {before}" in (tmp_path / "report/report.html").read_text()


def test_a_plan_of_a_server_is_asked_there_and_a_known_one_in_the_state(web: Path, tmp_path: Path) -> None:
    with RunningServer({"web": web}, tmp_path) as server:
        plan = {"seq_len": 31, "stages": [{"from_step": 0, "global_batch_size": 2, "mixture": {"web": 1}}]}
        plan_id = str(server.post_plan(plan).json()["id"])
        text = ("--text", "quick brown fox jumps over the lazy", "-n", "13", "--before-step", "9", "--json")
        asked = ("find", f"web={web}", "--plan", plan_id[:12], *text)
        done = run_here(*asked, "--server", server.url)
        assert done.returncode == 0, done.stderr
    kept = run_here(*asked, "--state-dir", tmp_path / "state")
    assert kept.returncode == 0, kept.stderr
    reports = [json.loads(each.stdout) for each in (kept, done)]
    for each in reports:
        assert each["plan"] == plan_id
        assert each["corpora"][0].pop("scan_seconds") >= 0
    assert reports[0] == reports[1]
    other = run_here("find", f"other={web}", *asked[2:], "--state-dir", tmp_path / "state")
    assert other.returncode == 2
    assert "reads corpus 'web', too: name it as web=PATH" in other.stderr


IN_SMALL_DISK = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=4m none "$0" && exec "$@"']


@pytest.mark.skipif(
    subprocess.run([*IN_SMALL_DISK, "/mnt", "true"], capture_output=True, check=False).returncode != 0,
    reason="no file system can be mounted here",
)
def test_a_table_that_does_not_fit_the_disk_is_an_error(tmp_path: Path) -> None:
    """It is written through a map, where a full disk would end the process by a signal."""
    path = write_raw(tmp_path / "web.bin", some_tokens(1000))
    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"ids": some_tokens(300_000).tolist()}))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    done = subprocess.run(
        [*IN_SMALL_DISK, str(scratch), *command("find", path, "--items", items, "--column", "ids")],
        capture_output=True,
        text=True,
        env=environment(TMPDIR=str(scratch)),
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, ""), done
    assert "No space left on device" in done.stderr
