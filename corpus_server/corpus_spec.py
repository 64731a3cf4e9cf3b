"""What a user says of a corpus: its name, its files, and what the files do not say themselves.

    [NAME=]PATH[,PATH...][#SPLIT][,OPTION=VALUE...]

    /data/web                                   a token file or a folder of shards
    'web=/data/*_train_*.bin,/more/*.bin'       the files that patterns match
    s3://bucket/web                             the same in an object store, see `docs/stores.md`
    /data/web#train                             the files of one split, by the words of their names
    web=/data/web,dtype=uint32,eot=50256        options

An existing path wins over every other meaning of its `,`, `=`, `#`, `*`, `?` and `[`. The options are keys of
a table `[corpora.NAME]` in a configuration file, too, and its `path` is all between NAME and the options.
"""

from __future__ import annotations

import dataclasses
import glob
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from corpus_server.errors import InvalidParameter

SPLITS: Final = {
    **{word: word for word in ("train", "val", "test", "dev", "eval")},
    "valid": "val",
    "validation": "val",
}
"""Words in the names of files -> the split that they mean."""
MANIFEST: Final = "manifest.json"  # in a folder that `build` wrote; its splits have one each
OTHER: Final = "other"  # the split of files whose names say none
ALL: Final = "all"  # says that a corpus may hold files of several splits

_STORE: Final = re.compile(r"(s3|gs|az|https?)://[^/,#]*")
_OPTIONS: Final = ("dtype", "eot", "tokenizer", "include", "exclude", "token_range", "earlier")
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_NUMBER: Final = re.compile(r"[0-9]{1,19}")
_SPLIT: Final = re.compile(r"[A-Za-z]+(\+[A-Za-z]+)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSpec:
    """Which tokens are a corpus, and how to read them.

    Patterns are matched with the whole name of a shard, as descriptions show it: `*` and `?` stay within one
    folder, `**/` stands for any folders.
    """

    name: str  # letters, digits, `.`, `_`, `-`; what URLs and plans call it
    path: Path  # a token file or a folder of shards
    store: str | None = None  # `s3://bucket`: the object store in which the path lies; None: on this machine
    include: tuple[str, ...] = ()  # patterns of the folder's shards that count; () stands for all
    exclude: tuple[str, ...] = ()  # patterns of shards that do not
    split: str | None = (
        None  # a value of SPLITS, several joined by `+`, OTHER or ALL; None: there is only one
    )
    token_range: tuple[int, int] | None = None  # the tokens [start, stop) of what is left are the corpus
    dtype: str | None = None  # token type of headerless files; None takes the format's default
    eot: int | None = (
        None  # id of the end-of-text token; None takes that of the document ends beside the shards
    )
    earlier: tuple[str, ...] = ()  # corpora served here that hold what this one held before
    tokenizer: str | None = None  # `bytes`, `none`, the path of a file, or None to look beside the shards

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidParameter(
                f"corpus name {self.name!r} must be 1 to 128 letters, digits, '.', '_' or '-', starting with "
                "a letter or digit; give one with NAME=PATH",
                parameter="name",
                received=self.name,
            )

    @classmethod
    def parse(cls, text: str) -> CorpusSpec:
        """Read what the command line says of a corpus.

        Without a name, the corpus is called as its folder, or as its file without the extension; behind it
        stands the split: `/data/web#train` is `web-train`.
        """
        name, equals, rest = text.partition("=")
        if not equals or re.search("[/,#]", name) or _exists(Path(), text):
            name, rest = "", text
        path, options = _cut_options(rest)
        given = _read("", path, options, Path())
        return cls(name=name or _default_name(**given), **given).narrowed()

    @classmethod
    def from_table(cls, name: str, table: Mapping[str, Any], *, folder: Path, where: str = "") -> CorpusSpec:
        """Read the table `[corpora.NAME]` of a configuration file; its paths are relative to `folder`.

        `where` names the table in errors.
        """
        path, *_ = _strings(f"{where}path", [table.get("path")])
        options = {key: value for key, value in table.items() if key != "path"}
        return cls(name=name, **_read(where, path, options, folder)).narrowed()

    def narrowed(self) -> CorpusSpec:
        """Return the same corpus as a folder of its own, if it is one split of a corpus that `build` made.

        Tokenizer and recorded hashes of such a split lie in the split's folder.
        """
        folder = self.path / (self.split or "")
        if self.split is None or self.include or self.exclude or not (folder / MANIFEST).is_file():
            return self
        return dataclasses.replace(self, path=folder, split=None)

    def path_text(self, split: str | None = None) -> str:
        """Return the path as a shell takes it, with `#SPLIT` if there is one."""
        patterns = [os.path.join(self.path, each) for each in self.include] or [str(self.path)]  # noqa: PTH118
        patterns = [f"{self.store or ''}{each}" for each in patterns]
        return shlex.quote(",".join(patterns) + ("" if split is None else f"#{split}"))


def split_of(name: str) -> str:
    """Return the split that a shard's name says, or OTHER; several are joined by `+`.

    It is a word of the file's name, or of a folder's in the corpus: letters between separators or digits.
    """
    words = (SPLITS.get(word.lower()) for word in re.findall(r"[^\W\d_]+", name))
    return "+".join(sorted({word for word in words if word})) or OTHER


def _at(folder: Path, text: str) -> Path:
    return folder / os.path.expanduser(text)  # noqa: PTH111  # Path.expanduser fails on unknown users


def _exists(folder: Path, text: str) -> bool:
    return bool(text) and os.path.exists(_at(folder, text))  # noqa: PTH110  # Path.exists fails on long names


def _default_name(path: Path, split: str | None = None, store: str | None = None, **_: object) -> str:
    # Not `stem`: of the Megatron prefix llama-1.5B_text_document it would leave llama-1.
    is_folder = store is None and path.is_dir()
    name = path.name if is_folder else re.sub(r"\.[a-z]+$", "", path.name)
    if split not in (None, ALL):
        name += f"-{split.replace('+', '-')}"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")[:128] or "corpus"


def _cut_options(text: str) -> tuple[str, dict[str, str]]:
    """Cut `PATH,OPTION=VALUE...` into the path and the options; a value may hold commas."""
    pieces = text.split(",")
    # The longest existing path may hold what looks like an option.
    heads = (",".join(pieces[:number]) for number in range(1, len(pieces) + 1))
    existing = (_exists(Path(), _cut_split(Path(), head)[0]) for head in heads)
    first = max((number for number, exists in enumerate(existing, 1) if exists), default=1)
    path, options, key = pieces[:first], dict[str, str](), ""
    for piece in pieces[first:]:
        word, equals, value = piece.partition("=")
        if equals and word.isidentifier() and not _exists(Path(), piece):
            if word in options:
                raise InvalidParameter(f"{word} is given twice in {text!r}", parameter=word)
            options[word], key = value, word
        elif key:
            options[key] += f",{piece}"
        else:
            path.append(piece)
    return ",".join(path), options


def _read(where: str, path: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return all fields but the name."""
    fields, given = _read_path(folder, path), _read_options(where, options, folder)
    if "include" in fields and "include" in given:
        raise InvalidParameter(
            f"{where}include is given, but the path holds patterns: {path}; give one of them"
        )
    return fields | given


def _read_path(folder: Path, text: str) -> dict[str, Any]:
    """Return path, include and split of `PATH[,PATH...][#SPLIT]`, relative to `folder`."""
    text, split = _cut_split(folder, text)
    pieces = [text] if _exists(folder, text) else text.split(",")
    if not all(pieces):  # an empty path would be the current folder
        raise InvalidParameter.expected("path", "a path, or several joined by commas", text)
    if _STORE.match(text):
        store, paths = _read_urls(pieces)
        literal = [not glob.has_magic(piece) for piece in pieces]
    else:
        store, paths = None, [_at(folder, piece).resolve() for piece in pieces]
        literal = [_exists(folder, piece) or not glob.has_magic(piece) for piece in pieces]
    if len(pieces) == 1 and literal[0]:
        return {"path": paths[0], "store": store, "split": _read_split(split)}
    roots, patterns = [], []
    for path, is_literal in zip(paths, literal, strict=True):
        depth = next((n for n in range(1, len(path.parts)) if _is_pattern(*path.parts[: n + 1])), -1)
        root = Path(*path.parts[:depth]) if len(path.parts) > 1 else path
        rest = path.parts[len(root.parts) :]
        rest = tuple(map(glob.escape, rest)) if is_literal else rest
        roots.append(root)
        is_folder = is_literal and store is None and path.is_dir()
        patterns.append(root.joinpath(*rest, *(["**"] if is_folder else [])))
    common = Path(os.path.commonpath(roots))
    return {
        "path": common,
        "store": store,
        "include": tuple(pattern.relative_to(common).as_posix() for pattern in patterns),
        "split": _read_split(split),
    }


def _read_urls(pieces: list[str]) -> tuple[str, list[Path]]:
    """Return the object store of some URLs, and their paths in it."""
    found = [match[0] if (match := _STORE.match(piece)) else piece for piece in pieces]
    if other := next((each for each in found if each != found[0]), None):
        raise InvalidParameter.expected("path", f"URLs of one store, {found[0]}", other)
    return found[0], [Path("/", piece[len(found[0]) :].strip("/")) for piece in pieces]


def _is_pattern(*parts: str) -> bool:
    """Tell whether the last part of a path is a pattern; in an existing path its characters are literal."""
    return glob.has_magic(parts[-1]) and not _exists(Path(), os.path.join(*parts))  # noqa: PTH118


def _cut_split(folder: Path, text: str) -> tuple[str, str | None]:
    before, mark, after = text.rpartition("#")
    if mark and _SPLIT.fullmatch(after) and not _exists(folder, text):
        return before, after
    return text, None


def _read_split(text: str | None) -> str | None:
    if text is None:
        return None
    words = [SPLITS.get(word.lower(), word.lower()) for word in text.split("+")]
    if unknown := [word for word in words if word not in {*SPLITS.values(), OTHER, ALL}]:
        accepted = f"one of {', '.join(SPLITS)}, {OTHER} (names that say none), {ALL}"
        raise InvalidParameter.expected("split", accepted, unknown[0])
    return "+".join(sorted(set(words)))


def _read_options(where: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the options as fields; values are those of TOML, or text of the command line."""
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise InvalidParameter(
            f"{where}unknown {', '.join(unknown)}; known are {', '.join(sorted(('path', *_OPTIONS)))}",
            parameter=unknown[0],
        )
    given: dict[str, Any] = {}
    for key, value in options.items():
        if key in ("include", "exclude", "earlier"):
            given[key] = tuple(_strings(where + key, value.split(",") if isinstance(value, str) else value))
        elif key == "eot":
            (given[key],) = _integers(where + key, "an id, 0 or more", [value], 1)
        elif key == "token_range":
            accepted = "start and stop, two numbers with 0 <= start < stop"
            pair = value.split(",") if isinstance(value, str) else value
            start, stop = given[key] = _integers(where + key, accepted, pair, 2)
            if start >= stop:
                raise InvalidParameter.expected(where + key, accepted, value)
        else:
            (given[key],) = _strings(where + key, [value])
    if given.get("tokenizer", "none") not in ("bytes", "none"):
        given["tokenizer"] = str(_at(folder, given["tokenizer"]).absolute())
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
