"""What users say of a corpus: one grammar for the command line and the file, which the text alone decides."""

from __future__ import annotations

import dataclasses
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.corpus.selection import list_shards
from corpus_server.corpus_spec import SPLITS, CorpusSpec, split_of, with_views
from corpus_server.errors import InvalidParameter, UnreadableCorpus
from tests.serving import ROOT

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("/data/web", "web", {"path": "/data/web"}),
    ("/data/train.bin", "train", {"path": "/data/train.bin"}),
    ("/d/llama-1.5B_text_document", "llama-1.5B_text_document", {"path": "/d/llama-1.5B_text_document"}),
    ("web=/data/x.bin", "web", {"path": "/data/x.bin"}),
    ("web.v2=/data/x", "web.v2", {"path": "/data/x"}),
    ("/data/a=b/web", "web", {"path": "/data/a=b/web"}),
    ("web=/data/a=b", "web", {"path": "/data/a=b"}),
    ("/data/größe 1", "gr-e-1", {"path": "/data/größe 1"}),
    ("/data/_x", "x", {"path": "/data/_x"}),
    ("/", "corpus", {"path": "/"}),
    ("~no-such-user/x", "x", {"path": "~no-such-user/x"}),
    ("/data/web#train", "web-train", {"path": "/data/web", "split": "train"}),
    ("/data/web#Validation", "web-val", {"path": "/data/web", "split": "val"}),
    ("/data/web#val+train", "web-train-val", {"path": "/data/web", "split": "train+val"}),
    ("/data/web#all", "web", {"path": "/data/web", "split": "all"}),
    ("w=/data/web#other,dtype=uint8", "w", {"path": "/data/web", "split": "other", "dtype": "uint8"}),
    ("/data/web/*_train_*.bin", "web", {"path": "/data/web", "include": ("*_train_*.bin",)}),
    ("/d/a*/[xy]?.bin#dev", "d-dev", {"path": "/d", "include": ("a*/[xy]?.bin",), "split": "dev"}),
    ("/d/c#*.bin", "d", {"path": "/d", "include": ("c#*.bin",)}),
    ("w=/1/web/t*.bin,/2/t*.bin", "w", {"path": "/", "include": ("1/web/t*.bin", "2/t*.bin")}),
    ("w=/1/a.bin,/1/b*", "w", {"path": "/1", "include": ("a.bin", "b*")}),
    ("/d/x,dtype=uint32,eot=5", "x", {"path": "/d/x", "dtype": "uint32", "eot": 5}),
    ("/d/x,tokenizer=/t/a,b.json", "x", {"path": "/d/x", "tokenizer": "/t/a,b.json"}),
    ("/d/x,exclude=a*,b,include=**/c", "x", {"path": "/d/x", "exclude": ("a*", "b"), "include": ("**/c",)}),
    ("/d/x,token_range=0,10", "x", {"path": "/d/x", "token_range": (0, 10)}),
    ("/d/x,tokenizer=bytes", "x", {"path": "/d/x", "tokenizer": "bytes"}),
    ("/d/x,tokenizer=none", "x", {"path": "/d/x", "tokenizer": "none"}),
    ("/d/x,mask=no,eot=5", "x", {"path": "/d/x", "mask": False, "eot": 5}),
    ("/d/x,mask=yes", "x", {"path": "/d/x"}),
    (r"/d/a\,b.bin", "a-b", {"path": "/d/a,b.bin"}),
    (r"a\=b", "a-b", {"path": "a=b"}),
    (r"web=a=b", "web", {"path": "a=b"}),
    (r"/d/q\#train", "q-train", {"path": "/d/q#train"}),
    (r"/d/q\#train#val", "q-train-val", {"path": "/d/q#train", "split": "val"}),
    (r"/d/a\,dtype=uint8,eot=3", "a-dtype-uint8", {"path": "/d/a,dtype=uint8", "eot": 3}),
    (r"x=a,dtype\=uint8", "x", {"path": ".", "include": ("a", "dtype=uint8")}),
    (r"/d/\[x]/s\*r\?\[0].bin", "s-r-0", {"path": "/d/[x]/s*r?[0].bin"}),
    (r"/d/\[x]/a\*b*\#", "x", {"path": "/d/[x]", "include": ("a[*]b*#",)}),
    (r"w=/1/[a]/\*,/1/b*", "w", {"path": "/1", "include": ("[a]/[*]", "b*")}),
    (r"/d/a\b\\\,c\\", "a-b-c", {"path": "/d/a\\b\\,c\\"}),
    (r"/d/x,tokenizer=/t/a\,eot\=1", "x", {"path": "/d/x", "tokenizer": "/t/a,eot=1"}),
    (r"/d/x,exclude=a\,b\*,\[c", "x", {"path": "/d/x", "exclude": ("a,b[*]", "[[]c")}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "name", "fields"), CASES, ids=[text for text, *_ in CASES])
def test_the_command_line(text: str, name: str, fields: dict[str, Any]) -> None:
    path = Path(fields["path"])
    assert CorpusSpec.parse(text) == CorpusSpec(**{**fields, "name": name, "path": Path.cwd() / path})


def test_no_file_changes_what_a_text_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text, name, fields in CASES:
        path = tmp_path / text
        if not text.startswith(("/", "~")) and "/" not in text:
            path.touch()
            assert CorpusSpec.parse(text).path == tmp_path / fields["path"], (text, name)


def test_a_path_is_shown_as_it_is_given(tmp_path: Path) -> None:
    name = r"a,b=c#train*?[0]\,dtype=uint8.bin"
    (tmp_path / name).touch()
    (given,) = shlex.split(CorpusSpec(name="x", path=tmp_path / name).path_text("val"))
    assert given == rf"{tmp_path}/a\,b=c\#train\*\?\[0]\\\,dtype=uint8.bin#val"
    assert CorpusSpec.parse(f"x={given}") == CorpusSpec(name="x", path=tmp_path / name, split="val")


def test_a_file_and_a_folder_beside_patterns(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    spec = CorpusSpec.parse(rf"c={tmp_path}/a\[0].bin,{tmp_path}/b*,{tmp_path}/sub")
    assert (spec.path, spec.include) == (tmp_path, ("a[[]0].bin", "b*", "sub/**"))
    assert spec.path_text() == rf"'{tmp_path}/a\[0].bin,{tmp_path}/b*,{tmp_path}/sub/**'"


@pytest.mark.parametrize("text", ["a,b.bin", "/d/a#train", "/d/s*", "web=web"])
def test_a_path_that_is_not_there_says_how_to_write_one(text: str) -> None:
    with pytest.raises(UnreadableCorpus, match=r"write \\ before a"):
        list_shards(CorpusSpec.parse(text))


def test_a_relative_path_is_resolved_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert CorpusSpec.parse("web=data/../x.bin").path == tmp_path / "x.bin"
    assert CorpusSpec.parse("data/../*.bin").path == tmp_path
    assert CorpusSpec.parse(".").path == tmp_path
    assert CorpusSpec.parse("x,tokenizer=t.json").tokenizer == str(tmp_path / "t.json")


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".web", "-web", "a/b", "a b", "ä", "web\n", "web\x00", "a" * 129, "a?b", "a%2fb"]
)
def test_names_that_would_not_survive_a_url_are_refused(name: str) -> None:
    with pytest.raises(InvalidParameter, match="NAME=PATH"):
        CorpusSpec(name=name, path=Path("/data"))


MISTAKES = [
    ("a b=/data", "corpus name 'a b'"),
    (
        "/d/x,dtpye=uint8",
        "unknown dtpye; known are address, dtype, earlier, eot, eot_at, exclude, include, license, "
        "mask, token_range, tokenizer, view",
    ),
    ("/d/x,dtype=uint8,dtype=uint8", "dtype is given twice"),
    ("/d/x,eot=end", "eot must be an id, 0 or more, got 'end'"),
    ("/d/x,eot=-1", "eot must be an id, 0 or more, got '-1'"),
    ("/d/x,token_range=5", "token_range must be start and stop, two numbers with 0 <= start < stop"),
    ("/d/x,token_range=5,5", "0 <= start < stop"),
    ("/d/x,dtype=", "dtype must be a string"),
    ("/d/x,mask=maybe", "mask must be yes or no, got 'maybe'"),
    ("/d/*.bin,include=a*", r"include is given, but the path holds patterns: /d/\*\.bin"),
    ("web=", "path must be a path, .* got ''"),
    ("=/d/x", "corpus name '' must be 1 to 128"),
    ("=x", "corpus name '' must be 1 to 128"),
    ("/d/x,/d/x", "path must be several, each once, got '/d/x,/d/x'"),
    ("/d/x,/d/y/../x", "path must be several, each once"),
    ("w=/d/a*.bin,/d/b,/d/a*.bin", "path must be several, each once"),
    ("s3://b/x,s3://b/x", "path must be several, each once"),
    ("w=/d/a*.bin,", "path must be a path, .* got '/d/a.*,'"),
    ("/d/x,exclude=a,", "exclude must be"),
    (
        "/d/x#tarin",
        "split must be one of train, val, test, dev, eval, valid, validation, holdout, other .* got 'tarin'",
    ),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[text for text, _ in MISTAKES])
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        CorpusSpec.parse(text)


def test_a_table_says_what_the_command_line_says(tmp_path: Path) -> None:
    table = """
        path = "data/*.bin#train"
        dtype = "uint32"
        eot = 50256
        tokenizer = "tok.json"
        mask = "no"
        exclude = ["b*", "c"]
        token_range = [0, 10]
        earlier = ["x", "y"]
    """
    spec = CorpusSpec.from_table("web", tomllib.loads(table), folder=tmp_path)
    options = f"tokenizer={tmp_path}/tok.json,mask=no,exclude=b*,c,token_range=0,10,earlier=x,y"
    text = f"web={tmp_path}/data/*.bin#train,dtype=uint32,eot=50256,{options}"
    assert spec == CorpusSpec.parse(text)


@pytest.mark.parametrize("value", ["1", "0", '"true"', "[]"])
def test_a_mask_in_a_table_is_yes_or_no_or_a_boolean(tmp_path: Path, value: str) -> None:
    table = tomllib.loads(f'path = "/d"\nmask = {value}')
    with pytest.raises(InvalidParameter, match="mask must be yes or no"):
        CorpusSpec.from_table("web", table, folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train.bin", "train"),
        ("val.bin", "val"),
        ("tinyshakespeare_train.bin", "train"),
        ("fineweb_val_000000.bin", "val"),
        ("pile_train_text_document.bin", "train"),
        ("train-00000-of-00010.bin", "train"),
        ("x.TRAIN.bin", "train"),
        ("train01.bin", "train"),
        ("valid/part-0.bin", "val"),
        ("en/validation/0.bin", "val"),
        ("my test set.bin", "test"),
        ("dev.bin", "dev"),
        ("eval/val_0.bin", "eval+val"),
        ("train/validation_0.bin", "train+val"),
        ("pretrain.bin", "other"),
        ("retrained_0.bin", "other"),
        ("latest.bin", "other"),
        ("developer/validity.bin", "other"),
        ("trainé.bin", "other"),
    ],
)
def test_the_split_is_a_word_of_the_name(name: str, split: str) -> None:
    assert split_of(name) == split


PARTS = [*"ab=,#*?[]\\/.~+-_ \nä\udcff", "dtype=", "eot=", "token_range=", "1"]


@given(text=st.lists(st.sampled_from(PARTS), max_size=20).map("".join))
@settings(max_examples=1000)
def test_any_text_is_a_corpus_or_a_mistake(text: str) -> None:
    try:
        spec = CorpusSpec.parse(text)
    except InvalidParameter:
        return
    assert spec.path.is_absolute()
    (shown,) = shlex.split(spec.path_text(spec.split))
    again = CorpusSpec.parse(f"{spec.name}={shown}")
    assert shlex.split(again.path_text(again.split)) == [shown]


def test_every_option_is_explained() -> None:
    text = (ROOT / "docs" / "corpora.md").read_text()
    options = {field.name for field in dataclasses.fields(CorpusSpec)} - {
        "name",
        "path",
        "split",
        "store",
        "of",
    }
    assert [option for option in sorted(options) if f"| `{option}` |" not in text] == []
    assert [word for word in SPLITS if f"`{word}`" not in text] == []


def test_a_view_has_the_files_of_the_corpus_that_it_names(tmp_path: Path) -> None:
    """A path that is no name of another corpus is a path."""
    web = CorpusSpec.parse(f"web={tmp_path}/web,eot=3,dtype=uint32")
    hq = CorpusSpec.parse(f"hq=web?view={tmp_path}/hq.view")
    alone = CorpusSpec.parse(f"{tmp_path}/web?view={tmp_path}/some.view,eot=5")
    assert (alone.name, alone.path, alone.eot) == ("some", tmp_path / "web", 5)
    table = {"path": "web", "view": "hq.view"}
    assert CorpusSpec.from_table("hq", table, folder=tmp_path).view == hq.view == f"{tmp_path}/hq.view"
    found = with_views([hq, web, alone])
    assert found[0] == dataclasses.replace(web, name="hq", view=hq.view)
    assert found[1:] == (web, alone)
    assert with_views([hq]) == (hq,)


@pytest.mark.parametrize("option", ["mask=no", "tokenizer=bytes", "eot=7", "dtype=uint32", "exclude=a.bin"])
def test_an_option_of_a_view_that_the_served_corpus_decides_is_refused(option: str, tmp_path: Path) -> None:
    """The failure was: it was dropped without a word."""
    web = CorpusSpec.parse(f"web={tmp_path}/web,eot=7")
    view = CorpusSpec.parse(f"hq=web?view={tmp_path}/hq.view,{option}")
    with pytest.raises(InvalidParameter, match=f"give {option.partition('=')[0]} to 'web'"):
        with_views([web, view])
