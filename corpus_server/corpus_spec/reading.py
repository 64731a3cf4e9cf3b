"""What a text or a table says of a corpus, as fields of `CorpusSpec`."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from corpus_server.errors import InvalidParameter

MAX_LICENSE: Final = 200

SPLITS: Final = {
    **{word: word for word in ("train", "val", "test", "dev", "eval")},
    "valid": "val",
    "validation": "val",
    "holdout": "val",
}
"""Words in the names of files -> the split that they mean."""
MANIFEST: Final = "manifest.json"  # in a folder that `build` wrote; its splits have one each
OTHER: Final = "other"  # the split of files whose names say none
ALL: Final = "all"  # says that a corpus may hold files of several splits

HUB: Final = re.compile(
    r"hf://(?:(datasets|models)/)?([^/,#@]+(?:/[^/,#@]+)?)(?:@(refs/(?:convert|pr)/[^/,#]+|[^/,#]+))?"
)
"""A repository of the Hugging Face Hub: kind, None for a model; its name, most often ORG/NAME; revision."""

STORE: Final = re.compile(rf"(?:s3|gs|az|https?|file)://[^/,#]*|{HUB.pattern}")
"""How a path begins that is fetched, and not mapped where it lies."""
FILES: Final = "file://"
"""How one of them begins that lies on this machine, most often on a network's disk that is mounted."""

_TOKENIZER_FILES: Final = (".json", ".tiktoken", ".model")
_PATTERNS: Final = ("include", "exclude")
OPTIONS: Final = (
    *("dtype", "eot", "eot_at", "tokenizer", "mask", *_PATTERNS, "token_range", "earlier", "view"),
    *("address", "license"),
)
_VIEW: Final = "?view="  # PATH?view=FILE is PATH,view=FILE
_ADDRESS: Final = re.compile(r"(?:hf|s3|gs|az)://\S+|https?://[^\s/@]+(?:/\S*)?")
"""Where others can have a corpus; a URL with `USER:PASSWORD@` would tell them those."""
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NUMBER: Final = re.compile(r"[0-9]{1,19}")
_SPLIT: Final = re.compile(r"[A-Za-z]+(\+[A-Za-z]+)*")
_ESCAPED: Final = re.compile(r"\\([\\,=#*?[])")
_UNIT: Final = re.compile(rf"{_ESCAPED.pattern}|.", re.DOTALL)

EOT_PLACES: Final = ("first", "last")
"""Where a document has its end-of-text token."""

ESCAPES: Final = r"write \ before a , = # * ? or [ that belongs to a name"
"""What an error says about a path that is not there."""


def read_text(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the other fields of the corpus that a command line names."""
    name, *rest = _cut(text, "=")
    is_named = rest and not re.search("[/,#?]", name)
    name, path = (name, text[len(name) + 1 :]) if is_named else ("", text)
    fields = _read("", *_cut_options(path), Path())
    return name if is_named else _default_name(**fields), fields


def read_table(table: Mapping[str, Any], folder: Path, where: str) -> dict[str, Any]:
    """Return the fields, but for the name, that the table of a corpus says; `where` names it in errors."""
    path, *_ = _strings(f"{where}path", [table.get("path")])
    return _read(where, path, {key: value for key, value in table.items() if key != "path"}, folder)


def tokenizer_source(text: str, folder: Path = Path()) -> str:
    """Return what names a tokenizer: `bytes`, `none`, the absolute path of a file, or `hf://REPOSITORY`.

    `gpt2` and `ORG/NAME` are repositories of the Hugging Face Hub if there is no file of that name.
    """
    if text in ("bytes", "none") or HUB.match(text):
        return text
    path = _at(folder, text)
    may_be_repository = all(map(NAME.fullmatch, text.split("/", 1))) and path.suffix not in _TOKENIZER_FILES
    return f"hf://{text}" if may_be_repository and not path.exists() else str(path.absolute())


def split_of(name: str) -> str:
    """Return the split that a shard's name says, or OTHER; several are joined by `+`.

    It is a word of the file's name, or of a folder's in the corpus: letters between separators or digits.
    """
    words = (SPLITS.get(word.lower()) for word in re.findall(r"[^\W\d_]+", name))
    return "+".join(sorted({word for word in words if word})) or OTHER


def escaped(path: str) -> str:
    """Return an absolute path as `CorpusSpec.parse` takes it."""
    # No `=`: an absolute path begins neither with a name nor with an option.
    return re.sub(r"[\\,#*?[]", r"\\\g<0>", path)


def _at(folder: Path, text: str) -> Path:
    return folder / os.path.expanduser(text)  # noqa: PTH111  # Path.expanduser fails on unknown users


def _cut(text: str, mark: str) -> list[str]:
    """Cut a text at each `mark` that is not escaped; the pieces keep their escapes."""
    pieces = [""]
    for unit in _UNIT.finditer(text):
        if unit[0] == mark:
            pieces.append("")
        else:
            pieces[-1] += unit[0]
    return pieces


def _plain(text: str) -> str:
    return _ESCAPED.sub(r"\1", text)


def _pattern(text: str) -> str:
    """Return a pattern as `fnmatch` takes it."""
    return _ESCAPED.sub(lambda found: glob.escape(found[1]), text)


def _default_name(
    path: Path, split: str | None = None, store: str | None = None, view: str | None = None, **_: object
) -> str:
    if view is not None:
        path, split = Path(view), None
    # Not `stem`: of the Megatron prefix llama-1.5B_text_document it would leave llama-1.
    is_folder = store is None and path.is_dir()
    name = path.name if is_folder else re.sub(r"\.[a-z]+$", "", path.name)
    if not name and store is not None:  # of the bucket or the repository
        name = store.partition("@")[0].rpartition("/")[2]
    if split not in (None, ALL):
        name += f"-{split.replace('+', '-')}"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")[:128] or "corpus"


def _cut_options(text: str) -> tuple[str, dict[str, str]]:
    """Cut `PATH,OPTION=VALUE...` into the path and the options; a value may hold commas."""
    path, *pieces = _cut(text, ",")
    options, key = dict[str, str](), ""
    for piece in pieces:
        word, *value = _cut(piece, "=")
        if value and word.isidentifier():
            if word in options:
                raise InvalidParameter(f"{word} is given twice in {text!r}", parameter=word)
            options[word], key = piece[len(word) + 1 :], word
        elif key:
            options[key] += f",{piece}"
        else:
            path += f",{piece}"
    return path, {key: each if key in _PATTERNS else _plain(each) for key, each in options.items()}


def _read(where: str, path: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return all fields but the name."""
    if _VIEW in path:
        path, view = path.split(_VIEW, 1)
        options = {"view": _plain(view), **options}
    fields, given = _read_path(folder, path), _read_options(where, options, folder)
    if "include" in fields and "include" in given:
        raise InvalidParameter(
            f"{where}include is given, but the path holds patterns: {path}; give one of them, or {ESCAPES}"
        )
    return fields | given | ({"of": path} if "view" in given else {})


def _read_path(folder: Path, text: str) -> dict[str, Any]:
    """Return path, store, include and split of `PATH[,PATH...][#SPLIT]`, relative to `folder`."""
    text, split = cut_split(text)
    pieces = _cut(text, ",")
    if not all(pieces):  # an empty path would be the current folder
        raise InvalidParameter.expected("path", "a path, or several joined by commas", text)
    stores = [match[0] if (match := STORE.match(piece)) else None for piece in pieces]
    if other := next((n for n, each in enumerate(stores) if each != stores[0]), None):
        accepted = f"paths of one store, {stores[0] or 'this machine'}"
        raise InvalidParameter.expected("path", accepted, pieces[other])
    found = [_read_piece(folder, piece, store) for piece, store in zip(pieces, stores, strict=True)]
    if len(set(found)) < len(found):  # its tokens would be there once, too
        remedy = "the weights of a plan say how often tokens come"
        raise InvalidParameter.expected("path", "several, each once", text, remedy=remedy)
    fields = {"store": stores[0], "split": split}
    if len(found) == 1 and not found[0][1]:
        return {"path": found[0][0], **fields}
    for number, (path, pattern) in enumerate(found):
        if not pattern:
            below = ["**"] if stores[0] is None and path.is_dir() else []
            found[number] = path.parent, PurePosixPath(glob.escape(path.name), *below).as_posix()
    common = Path(os.path.commonpath([root for root, _ in found]))
    include = (
        PurePosixPath(glob.escape(root.relative_to(common).as_posix()), pattern) for root, pattern in found
    )
    return {"path": common, "include": tuple(map(str, include)), **fields}


def _read_piece(folder: Path, text: str, store: str | None) -> tuple[Path, str]:
    """Return the folders before the first pattern of a path, and the pattern, "" if there is none."""
    parts = text.removeprefix(store or "").split("/")
    is_pattern = (any(unit[0] in "*?[" for unit in _UNIT.finditer(part)) for part in parts)
    depth = next((number for number, found in enumerate(is_pattern) if found), len(parts))
    root = _plain("".join(f"{part}/" for part in parts[:depth]))
    pattern = _pattern("/".join(parts[depth:]))
    if store is not None:
        return Path("/", root.strip("/")), pattern
    try:
        return _at(folder, root).resolve(), pattern
    except RuntimeError:  # a symbolic link to itself: nothing will be found there
        return _at(folder, root).absolute(), pattern


def cut_split(text: str) -> tuple[str, str | None]:
    """Cut `PATH#SPLIT` into the path and the split, None if there is none."""
    *before, last = _cut(text, "#")
    if before and _SPLIT.fullmatch(last):
        return "#".join(before), _read_split(last)
    return text, None


def _read_split(text: str) -> str:
    words = [SPLITS.get(word.lower(), word.lower()) for word in text.split("+")]
    if unknown := [word for word in words if word not in {*SPLITS.values(), OTHER, ALL}]:
        accepted = f"one of {', '.join(SPLITS)}, {OTHER} (names that say none), {ALL}"
        raise InvalidParameter.expected("split", accepted, unknown[0])
    return "+".join(sorted(set(words)))


def _read_options(where: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options as fields; values are those of TOML, or text of the command line."""
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise InvalidParameter(
            f"{where}unknown {', '.join(unknown)}; known are "
            f"{', '.join(sorted((*OPTIONS, 'path') if where else OPTIONS))}",
            parameter=unknown[0],
        )
    given: dict[str, Any] = {}
    for key, value in options.items():
        several = _cut(value, ",") if isinstance(value, str) else value
        if key in _PATTERNS:
            given[key] = tuple(map(_pattern, _strings(where + key, several)))
        elif key == "earlier":
            given[key] = tuple(_strings(where + key, several))
        elif key == "mask":
            if value not in ("yes", "no") and not isinstance(value, bool):
                raise InvalidParameter.expected(where + key, "yes or no", value)
            given["mask"] = value in ("yes", True)
        elif key == "eot_at":
            if value not in EOT_PLACES:
                raise InvalidParameter.expected(where + key, " or ".join(EOT_PLACES), value)
            given[key] = value
        elif key == "eot":
            (given[key],) = _integers(where + key, "an id, 0 or more", [value], 1)
        elif key == "token_range":
            accepted = "start and stop, two numbers with 0 <= start < stop"
            start, stop = given[key] = _integers(where + key, accepted, several, 2)
            if start >= stop:
                raise InvalidParameter.expected(where + key, accepted, value)
        else:
            (given[key],) = _strings(where + key, [value])
    if "view" in given:
        given["view"] = str(_at(folder, given["view"]).absolute())
    if "address" in given and not _ADDRESS.fullmatch(given["address"]):
        accepted = "https://..., s3://..., hf://datasets/ORG/NAME or their like, without a password"
        raise InvalidParameter.expected(f"{where}address", accepted, given["address"])
    if "license" in given and not (given["license"].isprintable() and len(given["license"]) <= MAX_LICENSE):
        accepted = f"at most {MAX_LICENSE} printable characters, such as odc-by or a URL"
        raise InvalidParameter.expected(f"{where}license", accepted, given["license"])
    if "tokenizer" in given:
        given["tokenizer"] = tokenizer_source(given["tokenizer"], folder)
    return given


def _strings(what: str, values: Any) -> list[str]:
    if (
        isinstance(values, list)
        and values
        and all(isinstance(each, str) and each and "\0" not in each for each in values)
    ):
        return values
    received = values[0] if isinstance(values, list) and len(values) == 1 else values
    raise InvalidParameter.expected(what, "a string", received)


def _integers(what: str, accepted: str, values: Any, count: int) -> tuple[int, ...]:
    if isinstance(values, list) and len(values) == count:
        numbers = [
            int(each) if isinstance(each, str) and _NUMBER.fullmatch(each.strip()) else each
            for each in values
        ]
        if all(type(each) is int and each >= 0 for each in numbers):
            return tuple(numbers)
    raise InvalidParameter.expected(what, accepted, values[0] if count == 1 else values)
