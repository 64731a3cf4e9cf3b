"""Every kind of tokenizer gives texts back and knows its ids; a damaged file is refused by name."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from corpus_server.corpus.tokenizers import Tokenizer, open_tokenizer
from corpus_server.errors import MissingPackage, UnreadableCorpus

TEXTS = ["Grüße, 世界! 12345\r\n", "", "def f(x):\n    return x ** 2  # <|endoftext|>\n", "  two  spaces "]


def write_tokenizer_json(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=100)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def write_ranks(folder: Path, number: int = 50256, *, hole: int | None = None) -> Path:
    """Write a rank file: the bytes, two usual merges, then pairs that no text here holds.

    No token has the id `hole`.
    """
    tokens = [bytes([byte]) for byte in range(256)] + [b"re", b"  "]
    tokens += [b"\xff\xfe" + i.to_bytes(3, "big") for i in range(number - len(tokens))]
    ids = (i for i in range(number + 1) if i != hole)
    lines = (base64.b64encode(token) + b" %d\n" % i for i, token in zip(ids, tokens, strict=False))
    path = folder / "any.tiktoken"
    path.write_bytes(b"".join(lines))
    return path


def write_sentencepiece(folder: Path, **options: int) -> Path:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 20),
        model_writer=model,
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
        **options,
    )
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


WRITERS: dict[str, Callable[[Path], Path | str]] = {
    "bytes": lambda folder: "bytes",
    "tokenizer.json": write_tokenizer_json,
    "tiktoken": write_ranks,
    "sentencepiece": write_sentencepiece,
}
EOT = {"bytes": None, "tokenizer.json": 0, "tiktoken": 50256, "sentencepiece": 2}


@pytest.fixture(params=WRITERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tokenizer(kind: str, tmp_path: Path) -> Tokenizer:
    return open_tokenizer(WRITERS[kind](tmp_path))


def test_texts_come_back(tokenizer: Tokenizer) -> None:
    encoded = tokenizer.encode_batch(TEXTS)
    assert [(ids.dtype, ids.ndim) for ids in encoded] == [(np.uint32, 1)] * len(TEXTS)
    assert [tokenizer.decode(ids.tolist()) for ids in encoded] == TEXTS
    assert all(tokenizer.knows(token) and token < tokenizer.vocab_size for token in np.concatenate(encoded))


def test_the_name_of_a_special_token_in_a_text_is_plain_text(kind: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.eot_id == EOT[kind]
    (ids,) = tokenizer.encode_batch(["a<|endoftext|>b</s>c"])
    assert tokenizer.eot_id not in ids.tolist()
    assert tokenizer.encode_batch([]) == []


def test_special_tokens_are_shown_by_name(kind: str, tokenizer: Tokenizer) -> None:
    if tokenizer.eot_id is not None:
        words, more = (ids.tolist() for ids in tokenizer.encode_batch(["one", "two"]))
        name = "</s>" if kind == "sentencepiece" else "<|endoftext|>"
        assert tokenizer.decode([*words, tokenizer.eot_id, *more]) == f"one{name}two"


def test_ids_outside_the_vocabulary_are_not_known(tokenizer: Tokenizer) -> None:
    assert tokenizer.knows(0)
    assert tokenizer.knows(tokenizer.vocab_size - 1)
    assert not any(tokenizer.knows(token) for token in (-1, tokenizer.vocab_size, 2**31, 2**32 - 1))


@pytest.mark.parametrize(
    ("ids", "eot"),
    [
        ({"unk_id": 1, "bos_id": -1, "eos_id": 0}, 0),
        ({"eos_id": -1}, None),
    ],
    ids=["first", "none"],
)
def test_the_end_of_text_of_a_sentencepiece_model(
    tmp_path: Path, ids: dict[str, int], eot: int | None
) -> None:
    assert open_tokenizer(write_sentencepiece(tmp_path, **ids)).eot_id == eot


@pytest.mark.parametrize(
    ("number", "special"),
    [
        pytest.param(50256, {50256: "<|endoftext|>"}, id="gpt2"),
        pytest.param(50280, {50256: "<|endoftext|>"}, id="p50k_base"),
        pytest.param(
            100256,
            {
                100257: "<|endoftext|>",
                100258: "<|fim_prefix|>",
                100259: "<|fim_middle|>",
                100260: "<|fim_suffix|>",
                100276: "<|endofprompt|>",
            },
            id="cl100k_base",
        ),
        pytest.param(128000, {128000: "<|begin_of_text|>", 128001: "<|end_of_text|>"}, id="llama3"),
        pytest.param(151643, {151643: "<|endoftext|>"}, id="qwen"),
        pytest.param(199998, {199999: "<|endoftext|>", 200018: "<|endofprompt|>"}, id="o200k_base"),
    ],
)
def test_a_known_vocabulary_has_its_special_tokens(
    tmp_path: Path, number: int, special: dict[int, str]
) -> None:
    hole = min(special) if min(special) < number else None
    tokenizer = open_tokenizer(write_ranks(tmp_path, number, hole=hole))
    tokens = range(number - 1, number + 200)
    named = {token: tokenizer.decode([token]) for token in tokens if tokenizer.knows(token)}
    assert {token: name for token, name in named.items() if name.startswith("<|")} == {
        token: name for token, name in special.items() if token >= number
    }
    assert tokenizer.decode(list(special)) == "".join(special.values())
    assert tokenizer.vocab_size == max(number + (hole is not None), max(special) + 1)
    assert tokenizer.eot_id in special
    assert special[tokenizer.eot_id] in ("<|endoftext|>", "<|end_of_text|>")


def test_ranks_of_an_unknown_vocabulary_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    path = write_ranks(tmp_path, 1300)
    with pytest.raises(UnreadableCorpus) as caught:
        open_tokenizer(path)
    assert caught.value.detail == (
        f"{path}: holds 1,300 ranks, which no known vocabulary has (known: gpt2 (r50k_base) 50,256, "
        "p50k_base 50,280, cl100k_base 100,256, llama3 128,000, qwen 151,643, o200k_base 199,998); "
        "copy it again, or make a tokenizer.json of it: a rank file does not say how text is split"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a tokenizer, found something else"),
        (b"\x89PNG", r"give `bytes`, a tokenizer\.json, a tiktoken rank file"),
        (b"{", r"is not a tokenizer\.json that can be read"),
        (b"{", "was the copy interrupted"),
        (b'{"model": {"type": "none"}}', r"is not a tokenizer\.json .*does a newer release of the package"),
        (
            b'{"config": {"version": "v3"}, "vocab": [{"rank": 0, "token_bytes": "AA=="}]}',
            "is Mistral's tekken",
        ),
        (b'{"a": 0, "b": 1}', r"is a vocabulary \(vocab\.json\) without its merges; give `bytes`, a tok"),
        (
            b'{"tokenizer_class": "GPT2Tokenizer", "eos_token": "x"}',
            r"a tokenizer \(tokenizer_config\.json\)",
        ),
        (b'{"added_tokens_decoder": {}}', r"describes a tokenizer \(tokenizer_config\.json\), and is none"),
        (b'{"architectures": ["A"], "model_type": "a"}', r"describes a model \(config\.json\)"),
        (b'{"eos_token": "</s>"}', r"names special tokens \(special_tokens_map\.json\)"),
        (b'{"a": "b"}', "is JSON, and no tokenizer.json: it has no field 'model'"),
        (b"#version: 0.2\nt h\n", r"is a list of merges \(merges\.txt\) without their vocabulary"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "fetch the file: git lfs pull",
        ),
        (b"IQ== 0\nIg== x\n", "is not a tiktoken rank file"),
        (b"IQ== 0\nI@g== 1\n", "is not a tiktoken rank file"),
        (b"I@Q== 0\n", "expected a tokenizer, found something else"),
        (b"IQ== x\n", "expected a tokenizer, found something else"),
        (b" 0\n", "expected a tokenizer, found something else"),
        (b" \n{", r"is not a tokenizer\.json that can be read"),
        (b"\n\x0e\n\x05<unk>", "is not a SentencePiece model"),
    ],
)
def test_what_is_no_tokenizer_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tokenizer"
    path.write_bytes(content)
    with pytest.raises(UnreadableCorpus, match=message) as caught:
        open_tokenizer(path)
    assert str(path) in caught.value.detail
    with pytest.raises(UnreadableCorpus, match="cannot be read: No such file"):
        open_tokenizer(tmp_path / "missing")


@pytest.mark.parametrize("name", ["vocab.json", "tekken.json", "."])
def test_the_tokenizer_beside_another_file_of_a_model_is_named(tmp_path: Path, name: str) -> None:
    tokenizer = write_tokenizer_json(tmp_path)
    if name != ".":
        (tmp_path / name).write_text('{"a": 0}')
    with pytest.raises(UnreadableCorpus, match=f"; give {tokenizer}$"):
        open_tokenizer(tmp_path / name)


def test_a_tokenizer_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    for write in (write_tokenizer_json, write_ranks):
        path = write(tmp_path)
        ids = open_tokenizer(path).encode_batch(TEXTS)
        marked = tmp_path / f"marked-{path.name}"
        marked.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        found = open_tokenizer(marked).encode_batch(TEXTS)
        assert [each.tolist() for each in found] == [each.tolist() for each in ids]


@pytest.mark.parametrize(
    ("kind", "package"), [("tokenizer.json", "tokenizers"), ("tiktoken",) * 2, ("sentencepiece",) * 2]
)
def test_a_package_that_is_not_installed_is_named(
    kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = WRITERS[kind](tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackage, match=rf"{path} needs the package '{package}'") as caught:
        open_tokenizer(path)
    assert caught.value.remedy == "pip install 'corpus-server[text]'"
