"""Spans by text: whatever cuts the tokens, against brute force over the bytes."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus_server.corpus.index import index
from corpus_server.tools.finding import Items, Wanted, decoded, find, opened, scan
from tests.corpora import spec, write_raw
from tests.serving import command, environment, run_here

N = 12
WHITE = b" \t\n\r\v\f"
WORDS = [
    "amber",
    "birch",
    "cedar",
    "d\u00e9lta",
    "ember",
    "fjord",
    "\U0001f332",
    "inlet",
    "\u6797\u306e",
    "<x>",
    "42",
]


def some_texts(count: int, seed: int) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, int(draw.integers(5, 60)))) for _ in range(count)]


def byte_level(texts: list[str]) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=330, special_tokens=["<eot>"], initial_alphabet=alphabet)
    )
    return made


def metaspace(texts: list[str]) -> Tokenizer:
    """As Llama's: spaces are U+2581, and what the vocabulary lacks is bytes."""
    known = {"<eot>": 0, **{f"<0x{each:02X}>": each + 1 for each in range(256)}}
    known |= {each: 257 + n for n, each in enumerate("\u2581abcdefghijmnoprtvy")}
    known |= {each: 277 + n for n, each in enumerate(("\u2581a", "\u2581am", "er", "\u2581e"))}
    merges = [("\u2581", "a"), ("\u2581a", "m"), ("e", "r"), ("\u2581", "e")]
    made = Tokenizer(models.BPE(vocab=known, merges=merges, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return made


def word_pieces(texts: list[str]) -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=300, special_tokens=["<eot>", "<unk>"])
    )
    return made


KINDS = {"byte level": byte_level, "metaspace": metaspace}


def write_corpus(folder: Path, tokenizer: Tokenizer, texts: list[str]) -> list[int]:
    """Write two shards of documents; return the tokens."""
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    documents = [[*tokenizer.encode(each, add_special_tokens=False).ids, 0] for each in texts]
    half = len(documents) // 2
    for number, its in enumerate((documents[:half], documents[half:])):
        write_raw(folder / f"{number}.bin", [token for each in its for token in each])
    index(spec(folder, eot=0))
    return [token for each in documents for token in each]


def brute_force(data: list[bytes], items: list[bytes]) -> Iterator[tuple[int, int, int, int]]:
    """Yield item, its first byte, the first token and the one behind the last of all maximal spans.

    White space is left out of both.
    """
    data, items = (
        [each.translate(None, WHITE) for each in data],
        [each.translate(None, WHITE) for each in items],
    )
    text = b"".join(data)
    token_at = [number for number, each in enumerate(data) for _ in each]
    for number, item in enumerate(items):
        for i in range(len(item) - N + 1):
            j = text.find(item[i : i + N])
            while j >= 0:
                if not (i and j and item[i - 1] == text[j - 1]):
                    length = N
                    while item[i + length : i + length + 1] == text[j + length : j + length + 1] != b"":
                        length += 1
                    yield number, i, token_at[j], token_at[j + length - 1] + 1
                j = text.find(item[i : i + N], j + 1)


def held_by(spans: set[tuple[int, int, int, int]], item: int) -> set[int]:
    """Return the tokens of the corpus in spans of an item."""
    return {token for its, _, start, stop in spans if its == item for token in range(start, stop)}


@pytest.mark.parametrize("kind", KINDS)
def test_spans_are_those_of_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Items begin and end inside of words, and inside of tokens; borders of blocks are everywhere."""
    monkeypatch.setattr(scan, "STRETCH_TOKENS", 512)
    monkeypatch.setattr(scan, "BLOCK_TOKENS", 64)
    monkeypatch.setattr(decoded, "_BLOCK", 32)
    texts = some_texts(60, 1)
    tokenizer = KINDS[kind](texts)
    tokens = write_corpus(tmp_path / "web", tokenizer, texts)
    draw = np.random.default_rng(2)
    items = [each[int(draw.integers(9)) : 9 + int(draw.integers(60))] for each in texts[:20]]
    items += some_texts(10, 3)
    wanted = Items()
    for number, each in enumerate(items):
        wanted.add("test", number, (each,))
    named = spec(tmp_path / "web", eot=0)
    with opened([named]) as (corpus,):
        asked = Wanted(items=wanted, n=N, num_places=10**6, by_text=True)
        found = find(named, corpus, asked, num_processes=1)
        assert corpus.tokenizer is not None
        data = [b"\xff" if each == 0 else (corpus.tokenizer.bytes_of(each) or b"?") for each in tokens]
        joined = b"".join(data).replace(b"\xff", b"").decode()
        assert joined.replace(" ", "") == "".join(texts).replace(" ", "")
        spans = found.spans
        columns = (spans.item, spans.item_start, spans.start, spans.start + spans.length)
        told = set(zip(*(each.tolist() for each in columns), strict=True))
        expected = set(brute_force(data, [each.encode() for each in items]))
        assert told <= expected  # of what repeats itself, not every shift is listed
        assert len(told) > 50
        for item in range(len(items)):
            assert held_by(told, item) == held_by(expected, item), item
        holding = {
            corpus.document_at(token) for _, _, start, stop in expected for token in range(start, stop)
        }
        assert set(found.documents.tolist()) == holding


def test_a_text_is_found_that_its_tokens_are_not(tmp_path: Path) -> None:
    """In several processes, with a report whose text is cut where spans begin and end."""
    texts = some_texts(60, 1)
    write_corpus(tmp_path / "web", byte_level(texts), texts)
    whole = next(each for each in texts if len(each.encode()) > 120)
    part = whole[5:60].strip()
    item = f"Q:{part}?"
    asked = ("find", tmp_path / "web", "--text", item, "--json")
    report = json.loads(run_here(*asked, "--by", "text", "-n", "40", "--processes", "2").stdout)
    (found,) = report["items"]
    assert [each["text"] for each in found["parts"]] == ["Q:", part, "?"]
    sizes = tuple(len(each.replace(" ", "").encode()) for each in (item, part))
    assert (found["num_tokens"], found["num_covered"]) == sizes
    assert found["spans"][0]["documents"] == [texts.index(whole)]
    shown = run_here("find", tmp_path / "web", "--text", item, "--by", "text", "--out", tmp_path / "report")
    assert shown.returncode == 0, shown.stderr  # the item has fewer, so nothing is found
    assert "an item is found if 50 bytes of it stand together" in shown.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--tokens", "1,2,3"], "--by text looks for texts, and some items are token ids")],
)
def test_what_cannot_be_asked_by_text_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    texts = some_texts(4, 1)
    write_corpus(tmp_path / "web", byte_level(texts), texts)
    done = run_here("find", tmp_path / "web", "--by", "text", *words)
    assert (done.returncode, said in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr


def test_a_tokenizer_whose_texts_do_not_join_is_refused(tmp_path: Path) -> None:
    texts = some_texts(30, 1)
    write_corpus(tmp_path / "web", word_pieces(texts), texts)
    done = run_here("find", tmp_path / "web", "--by", "text", "--text", texts[0])
    assert done.returncode == 2
    assert "the texts of the tokens of corpus 'web' do not join to a text" in done.stderr
    raw = tmp_path / "raw"
    raw.mkdir()
    write_raw(raw / "0.bin", list(range(100)))
    done = run_here("find", raw, "--by", "text", "--text", texts[0])
    assert (done.returncode, "has no tokenizer, and so no text" in done.stderr) == (2, True), done.stderr


def test_white_space_is_no_text(tmp_path: Path) -> None:
    """Lines that are broken otherwise are found, and runs of blanks are not."""
    tokenizer = byte_level(some_texts(60, 1))
    code = "def f(amber):\n        return amber + birch  # the sum of both of them, and nothing else\n"
    texts = [code, *(f"{each}\n{' ' * 3000}\n{each[:9]}" for each in some_texts(30, 2))]
    write_corpus(tmp_path / "web", tokenizer, texts)
    items = tmp_path / "items.jsonl"
    broken = code.replace("        ", "\t").replace(", and", ",\r\n  and")
    items.write_text("".join(f"{json.dumps({'text': each})}\n" for each in (broken, f"no {' ' * 900} text")))
    asked = ("find", tmp_path / "web", "--items", items, "--by", "text", "--json")
    report = json.loads(run_here(*asked).stdout)
    (found,) = report["items"]
    assert (found["item"], found["share"], found["spans"][0]["documents"]) == (0, 1.0, [0])
    assert [each["text"] for each in found["parts"]] == [broken]
    assert report["corpora"][0]["num_items_too_short"] == 1


def test_spans_that_were_planted_are_found_by_another_tokenizer(tmp_path: Path) -> None:
    """At both ends of documents and shards, of a corpus whose tokenizer cuts the items otherwise."""
    draw, n = np.random.default_rng(4), 50
    letters = np.array(list("abcdefghijmnoprtvy \u00e9\u6797"))
    items = ["".join(draw.choice(letters, int(draw.integers(70, 200)))) for _ in range(300)]
    fill = some_texts(700, 5)
    texts, planted = [], []
    for number, text in enumerate(fill):
        item = number % len(items)
        size = len(items[item])
        at = int(draw.integers(0, size - 65))
        part = items[item][at : at + int(draw.integers(65, size - at + 1))]
        # Documents 0, 349, 350 and 699 are those at the ends of shards.
        texts.append((f"{part}.{text}", f"{text}.{part}", part)[number % 3])
        planted.append((item, part))
    tokens = write_corpus(tmp_path / "web", metaspace(fill), texts)
    source = tmp_path / "items.jsonl"
    source.write_text("".join(f"{json.dumps({'text': each})}\n" for each in items))
    asked = ("find", tmp_path / "web", "--items", source, "--by", "text", "--json", "--processes", "2")
    report = json.loads(run_here(*asked, "--places", "100000").stdout)
    named = spec(tmp_path / "web", eot=0)
    whole = {each["item"]: "".join(part["text"] for part in each["parts"]) for each in report["items"]}
    with opened([named]) as (corpus,):
        assert corpus.tokenizer is not None
        known = [b"\xff" if each == 0 else corpus.tokenizer.bytes_of(each) or b"?" for each in tokens]
        told: dict[int, list[tuple[int, bytes]]] = {}
        for each in report["items"]:
            text = items[each["item"]].encode().translate(None, WHITE)
            assert whole[each["item"]] == items[each["item"]]
            for span in each["spans"]:
                piece = text[span["item_start"] : span["item_stop"]]
                held = b"".join(known[span["start"] : span["stop"]]).translate(None, WHITE)
                assert len(piece) >= n
                assert piece in held
                assert piece not in held[len(known[span["start"]].translate(None, WHITE)) :] or not piece
                told.setdefault(each["item"], []).append((span["documents"][0], piece))
    for number, (item, part) in enumerate(planted):
        wanted = part.encode().translate(None, WHITE)
        if len(wanted) >= n:
            pieces = [piece for document, piece in told[item] if document == number]
            assert any(wanted in piece for piece in pieces), (number, part)


@pytest.mark.parametrize("rows", ["windows", "documents"])
def test_steps_that_saw_text_are_those_whose_rows_hold_its_bytes(tmp_path: Path, rows: str) -> None:
    """Against going through the rows of all steps of a run that stopped, over three epochs."""
    texts, n, before = some_texts(40, 1), 30, 39
    tokens = write_corpus(tmp_path / "web", byte_level(texts), texts)
    stage = {"from_step": 0, "global_batch_size": 2, "mixture": {"web": 1}}
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"seq_len": 63, "seed": 5, "rows": rows, "stages": [stage]}))
    wanted = [each[3:70] for each in texts if len(each) > 90][:6]
    asked = [f"web={tmp_path / 'web'}", "--plan", plan]
    words = [word for each in wanted for word in ("--text", each)]
    done = run_here("find", *asked, "--by", "text", "-n", n, "--before-step", before, *words, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    exported = run_here("export", *asked, "--step", "0", "--count", before)
    pieces = [json.loads(line) for line in exported.stdout.splitlines()]
    with opened([spec(tmp_path / "web", eot=0)]) as (corpus,):
        assert corpus.tokenizer is not None
        known = [
            b"" if each == 0 else (corpus.tokenizer.bytes_of(each) or b"?").translate(None, WHITE)
            for each in tokens
        ]
    num_seen = num_cut = 0
    for item in report["items"]:
        text = wanted[item["number"]].encode().translate(None, WHITE)
        for span in item["spans"]:
            piece = text[span["item_start"] : span["item_stop"]]
            grams = {piece[at : at + n] for at in range(len(piece) - n + 1)}
            steps = []
            for each in pieces:
                begin, end = max(each["start"], span["start"]), min(each["stop"], span["stop"])
                held = b"".join(known[begin:end]) if begin < end else b""
                is_seen = any(gram in held for gram in grams)
                steps += [each["step"]] if is_seen else []
                num_cut += bool(held) and not is_seen
            assert span["seen"]["steps"] == list(dict.fromkeys(steps)), span
            assert span["seen"]["num_rows"] == len(steps)
            num_seen += len(steps)
    assert num_seen > 10
    assert num_cut > 3 or rows == "documents"  # which are seldom cut


def test_memory_of_many_items_is_that_of_their_table(tmp_path: Path) -> None:
    """8 million bytes of items take 24 bytes each, and the program: 100,000 items stay below 2 GB."""
    draw, num_items = np.random.default_rng(6), 20_000
    data = draw.integers(33, 127, (num_items, 400), dtype=np.uint8)
    items = tmp_path / "items.jsonl"
    items.write_text("".join(f"{json.dumps({'text': bytes(each).decode()})}\n" for each in data))
    (tmp_path / "web.bin").write_bytes(data[:1000].tobytes())
    corpus = f"web={tmp_path / 'web.bin'},dtype=uint8,tokenizer=bytes"
    asked = ("find", corpus, "--items", str(items), "--by", "text", "--json", "--processes", "1")
    # Not `ru_maxrss`, which begins with what the process has that starts another.
    tell = "import atexit, sys; atexit.register(lambda: sys.stderr.write(open('/proc/self/status').read()))"
    done = subprocess.run(command(*asked, prelude=tell), capture_output=True, check=True, env=environment())
    report = json.loads(done.stdout)
    assert report["corpora"][0]["num_items_by_share"]["0.8"] == 1000
    (peak,) = re.findall(rb"VmHWM:\s+(\d+) kB", done.stderr)
    assert int(peak) < 500 << 10
