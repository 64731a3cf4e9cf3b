"""The tokens of a document are those of one call of the library, and the end-of-text token ends it alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from corpus_server.tools.building.driver import choose_options
from corpus_server.tools.building.inputs import find_inputs
from corpus_server.tools.building.job import BuildOptions, Part
from corpus_server.tools.building.part import PartResult, build_part, part_path
from corpus_server.tools.building.sources import plan_parts
from tests.server.tools.building.built import tokens_of
from tests.server.tools.building.sources import build_here, content, write_jsonl, write_parquet
from tests.server.tools.building.vocabularies import (
    EOT,
    KINDS,
    TEXTS,
    byte_level,
    in_one_call,
    write_config,
    write_vocabulary,
)
from tests.serving import run_here

NUM_CHARS = int(os.environ.get("CORPUS_TEXT_CHARS", "3000"))
_SPECIAL = [EOT, "<|endoftext|>", "<unk>", "[UNK]", "\0", " ", "\n", "fox", "dog</s>", "</", "s>", "ü", "世"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_vocabulary(tmp_path_factory.mktemp("tokenizer"), request.param)


def options_of(tokenizer: str, **others: object) -> BuildOptions:
    eot = None
    if tokenizer.endswith(".json"):
        eot = Tokenizer.from_file(tokenizer).token_to_id(EOT)
    return choose_options(tokenizer=tokenizer, eot=eot, **others)


def built(folder: Path, options: BuildOptions, *texts: str) -> tuple[list[list[int]], PartResult]:
    """Return the documents of a part that is made of these texts, and what it came to."""
    source = write_jsonl(folder / "a.jsonl", texts)
    parts = folder / "parts"
    parts.mkdir(exist_ok=True)
    for path in parts.iterdir():
        path.unlink()
    (file,) = find_inputs([str(source)]).inputs
    result = build_part(options, Part(number=0, slices=(file.whole(),)), parts)
    tokens = np.fromfile(part_path(parts, 0, "train.tokens"), options.part_dtype)
    lengths = np.fromfile(part_path(parts, 0, "train.lengths"), "<u8").astype(int)
    assert lengths.sum() == tokens.size
    return [each.tolist() for each in np.split(tokens, lengths.cumsum()[:-1]) if each.size], result


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.lists(st.sampled_from(_SPECIAL) | st.text(max_size=5), max_size=8), max_size=6))
def test_there_are_as_many_ends_of_text_as_documents(
    tokenizer: str, tmp_path: Path, texts: list[list[str]]
) -> None:
    """And those are right: as the library encodes them, unless it would end them early."""
    rows = ["".join(each) for each in texts] or [""]
    options = options_of(tokenizer, on_error="skip")
    documents, result = built(tmp_path, options, "fox", *rows)
    assert [each.count(options.eot) for each in documents] == [1] * len(documents)
    assert all(each[-1] == options.eot for each in documents)
    assert len(documents) + sum(result.left_out.values()) == len(rows) + 1
    wanted = [in_one_call(tokenizer, row) if row else [] for row in ["fox", *rows]]
    simple = [ids for ids in wanted if ids and options.eot not in ids]
    found = iter(document[:-1] for document in documents)
    assert all(ids in found for ids in simple)  # in their order


def test_texts_are_encoded_as_in_one_call(tokenizer: str, tmp_path: Path) -> None:
    options = options_of(tokenizer, on_error="skip")
    texts = [make(NUM_CHARS) for make in TEXTS.values()]
    documents, result = built(tmp_path, options, *texts)
    whole = {name: in_one_call(tokenizer, text) for name, text in zip(TEXTS, texts, strict=True)}
    found = {tuple(document[:-1]) for document in documents}
    for name, ids in whole.items():
        assert not ids or options.eot in ids or tuple(ids) in found, name
    with_eot = sum(options.eot in ids for ids in whole.values())
    assert len(result.skipped) <= with_eot


@pytest.mark.parametrize("kind", ["Unigram", "BPE prefix", "SentencePiece llama", "SentencePiece unigram"])
def test_a_text_of_a_million_characters_is_encoded_as_in_one_call(tmp_path: Path, kind: str) -> None:
    """A vocabulary that begins each call with a space must not put one into the text."""
    tokenizer = write_vocabulary(tmp_path, kind)
    text = "the quick brown fox\n" * 60_000
    assert len(text) > 1 << 20
    (document,), _ = built(tmp_path, options_of(tokenizer), text)
    assert document[:-1] == in_one_call(tokenizer, text)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_text_that_is_too_long_for_one_call_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("corpus_server.tools.building.kinds.text.TEXT_CHARS", 1000)
    monkeypatch.setattr("corpus_server.tools.building.kinds.text.PIECE_CHARS", 500)
    tokenizer = write_vocabulary(tmp_path, "BPE special")
    rows = ["fox", "the quick brown fox\n" * 60]
    if name == "a.txt":
        (tmp_path / name).write_text(rows[1])
    else:
        {"a.jsonl": write_jsonl, "a.parquet": write_parquet}[name](tmp_path / name, rows)
    said = run_in_process("build", tmp_path / name, "--tokenizer", tokenizer, "--out", tmp_path / "out")
    place = {"a.txt": "", "a.jsonl": " line 2:", "a.parquet": " row 1:"}[name]
    assert f"{name}:{place} is a text of more than 1,000 characters" in said
    assert "say --cut-texts" in said
    for source in ("bytes", tokenizer):  # bytes are the same in pieces
        cut = {} if source == "bytes" else {"cut_texts": True}
        (manifest,) = build_here(
            [tmp_path / name], tmp_path / f"{len(cut)}", tokenizer=source, **cut
        ).values()
        assert manifest.num_documents == (1 if name == "a.txt" else 2)


def run_in_process(*arguments: object) -> str:
    """Run the command line here, where limits are small; return what it says of a mistake."""
    from corpus_server.errors import UnreadableCorpus

    named = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    with pytest.raises(UnreadableCorpus) as caught:
        build_here([Path(str(arguments[1]))], Path(str(named["--out"])), tokenizer=str(named["--tokenizer"]))
    return caught.value.detail


def test_what_no_text_may_hold_is_refused_by_name_and_skipped_on_request(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["fine", "a\0b", "fine, too", ""])
    with source.open("ab") as file:
        file.write(b'{"text": "\\ud800"}\n{"text": 5}\n{"te')
    arguments = ("build", source, "--tokenizer", "bytes", "--out", tmp_path / "out")
    said = run_here(*arguments)
    (line,) = said.stderr.splitlines()
    assert said.returncode == 2
    assert f"{source}: line 2: its text holds '\\x00', which is encoded as the end-of-text token 0" in line
    assert "choose 255, which no text holds, with --eot, or leave such documents out with --on-error" in line

    said = run_here(*arguments, "--on-error", "skip")  # continues: what was read stays
    assert (said.returncode, said.stderr) == (0, "")
    assert "2 documents" in said.stdout
    assert re.search(r"left out +1 +empty or null", said.stdout)
    assert re.search(r"left out +4 +an error; skipped.txt lists them", said.stdout)
    skipped = (tmp_path / "out" / "skipped.txt").read_text().splitlines()
    assert [line.split(": ")[1] for line in skipped] == ["line 2", "line 5", "line 6", "line 7"]
    said = run_here("build", source, "--tokenizer", "bytes", "--out", tmp_path / "x", "--on-error", "ignore")
    assert "on_error must be 'refuse' or 'skip', got 'ignore'" in said.stderr
    assert (
        "documents end with token 255\n"
        in run_here(*arguments[:-1], tmp_path / "other", "--on-error", "skip", "--eot", "255").stdout
    )


def test_lines_that_are_all_wrong_are_a_wrong_option(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a"] * 300)
    arguments = ("--tokenizer", "bytes", "--out", tmp_path / "out", "--on-error", "skip")
    said = run_here("build", source, "--text-field", "body", *arguments)
    assert (said.returncode, said.stdout) == (2, "")
    assert "line 1: has no field 'body'" in said.stderr


@pytest.mark.parametrize("kind", ["Unigram", "WordLevel", "WordPiece", "tiktoken"])
def test_a_text_that_a_tokenizer_fails_for_is_named(tmp_path: Path, kind: str) -> None:
    """A tokenizer without its unknown token; a million spaces, which tiktoken cannot divide."""
    bad = "a zebra 🤗"
    path = tmp_path / "tokenizer.json"
    if kind == "tiktoken":
        path, bad = Path(write_vocabulary(tmp_path, kind)), "x" + " " * 1_000_000 + "y"
    else:
        model = {
            "Unigram": lambda: models.Unigram([("</s>", 0.0), ("a", -1.0), ("\u2581", -1.0)]),
            "WordLevel": lambda: models.WordLevel({"</s>": 0, "a": 1}, unk_token="<unk>"),
            "WordPiece": lambda: models.WordPiece({"</s>": 0, "a": 1}, unk_token="[UNK]"),
        }[kind]()
        made = Tokenizer(model)
        made.pre_tokenizer = pre_tokenizers.Metaspace() if kind == "Unigram" else pre_tokenizers.Whitespace()
        made.save(str(path))
    source = write_jsonl(tmp_path / "a.jsonl", ["a", bad, "a a"])
    arguments = ("build", source, "--tokenizer", path, "--out", tmp_path / "out", "--processes", "1")
    said = run_here(*arguments)
    (line,) = said.stderr.splitlines()
    assert said.returncode == 2
    assert f"{source}: line 2: the tokenizer cannot encode it: " in line
    said = run_here(*arguments, "--on-error", "skip")
    assert (said.returncode, said.stderr) == (0, "")
    assert re.search(r"left out +1 +an error", said.stdout)


def test_characters_that_are_in_no_token_are_counted(tmp_path: Path) -> None:
    made = Tokenizer(models.BPE({"</s>": 0, "a": 1, "b": 2}, []))
    made.save(str(tmp_path / "tokenizer.json"))
    source = write_jsonl(tmp_path / "a.jsonl", ["ab", "a x🤗b", "xyz"])
    said = run_here("build", source, "--tokenizer", tmp_path / "tokenizer.json", "--out", tmp_path / "out")
    assert said.returncode == 0
    assert (
        f"5 characters are left out, as the tokenizer has no token for them; first {source}: line 2: 'x'"
        in (said.stderr)
    )
    assert re.search(r"left out +1 +the tokenizer makes no token of it", said.stdout)


def test_a_document_in_pieces_is_left_out_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("corpus_server.tools.building.kinds.text.PIECE_CHARS", 10)
    monkeypatch.setattr("corpus_server.tools.building.kinds.text._READ_BYTES", 10)
    monkeypatch.setattr("corpus_server.tools.building.part._BATCH_SIZE", 25)
    for number in range(8):
        text = bytearray(b"0123456\n" * 10)
        if number % 2:
            text[number * 10] = (0, 255)[number % 4 > 1]  # ends the document, or is no text
        (tmp_path / f"{number}.txt").write_bytes(text)
    options = choose_options(tokenizer="bytes", eot=None, on_error="skip")
    (part,) = plan_parts(find_inputs([f"{tmp_path}/*.txt"]).inputs)
    (tmp_path / "parts").mkdir()
    result = build_part(options, part, tmp_path / "parts")
    assert (result.splits["train"].num_documents, result.num_tokens) == (4, 4 * 81)
    assert len(result.skipped) == 4
    tokens = np.fromfile(part_path(tmp_path / "parts", 0, "train.tokens"), "u1")
    assert tokens.tobytes() == (b"0123456\n" * 10 + b"\0") * 4


@pytest.mark.parametrize(
    ("special", "added", "config", "eot", "warning"),
    [
        (("<s>", "</s>"), ("<|endoftext|>",), {"eos_token": "</s>"}, "</s>", None),
        (("<s>", "</s>"), ("<|endoftext|>",), {}, "</s>", None),
        (("</s>", "<|endoftext|>"), (), {"eos_token": {"content": "</s>"}}, "</s>", None),
        (("<|endoftext|>", "<|im_end|>"), (), {"eos_token": "<|im_end|>"}, "<|endoftext|>", "'<|im_end|>'"),
        (("<|im_end|>",), (), {"eos_token": "<|im_end|>"}, "<|im_end|>", None),
        (("<s>",), ("<|endoftext|>",), {"eos_token": None}, "<|endoftext|>", None),
    ],
)  # fmt: skip
def test_the_end_of_text_is_the_special_token_and_a_file_that_disagrees_is_named(
    tmp_path: Path,
    special: tuple[str, ...],
    added: tuple[str, ...],
    config: dict[str, object],
    eot: str,
    warning: str | None,
) -> None:
    made = byte_level(*special, added=tuple(AddedToken(each, special=False) for each in added))
    made.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path, **config)
    source = write_jsonl(tmp_path / "a.jsonl", ["fox"])
    arguments = ("build", source, "--tokenizer", tmp_path / "tokenizer.json", "--out", tmp_path / "out")
    said = run_here(*arguments)
    assert said.returncode == 0
    assert f"documents end with token {made.token_to_id(eot)} {eot!r}\n" in said.stdout
    if warning is None:
        assert said.stderr == ""
    else:
        assert f"tokenizer_config.json beside the tokenizer says {warning}: choose" in said.stderr
        arguments = (*arguments[:-1], tmp_path / "confirmed")
        assert run_here(*arguments, "--eot", made.token_to_id(eot)).stderr == ""
    assert "tokenizer_config.json" not in content(tmp_path / "out")


@pytest.mark.parametrize(
    ("size", "added", "dtype"),
    [(65_535, 0, "uint16"), (65_536, 0, "uint16"), (65_537, 0, "uint32"), (65_536, 1, "uint32")],
)
def test_the_largest_id_of_a_vocabulary_fits_its_tokens(
    tmp_path: Path, size: int, added: int, dtype: str
) -> None:
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>"] * added)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = write_jsonl(tmp_path / "a.jsonl", [f"w{size - 1} w1"])
    eot = size if added else 2
    (built,) = build_here(
        [source], tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"), eot=None if added else 2
    ).values()
    assert built.dtype == dtype
    assert tokens_of(tmp_path / "out").tolist() == [size - 1, 1, eot]
