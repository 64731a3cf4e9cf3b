"""One corpus, as a user says it."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from corpus_server.corpus_spec.reading import MANIFEST, NAME, escaped, read_table, read_text
from corpus_server.errors import InvalidParameter

_OF_FILES: Final = (
    "include",
    "exclude",
    "split",
    "token_range",
    "dtype",
    "eot",
    "eot_at",
    "tokenizer",
    "mask",
)
"""What a view has from the corpus that it names."""
_CLASS: Final = re.compile(r"\[([*?[])\]|\[!?\]?[^\]]*\]")  # of a pattern; group 1 of one that escapes


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusSpec:
    """Which tokens are a corpus, and how to read them.

    Patterns are matched with the whole name of a shard, as descriptions show it: `*` and `?` stay within one
    folder, `**/` stands for any folders.
    """

    name: str  # letters, digits, `.`, `_`, `-`; what URLs and plans call it
    path: Path  # a token file or a folder of shards
    store: str | None = None  # `s3://bucket` or `hf://datasets/ORG/NAME`: where the path lies; None: here
    include: tuple[str, ...] = ()  # patterns of the folder's shards that count; () stands for all
    exclude: tuple[str, ...] = ()  # patterns of shards that do not
    split: str | None = None  # values of SPLITS joined by `+`, OTHER or ALL; None: there is only one
    token_range: tuple[int, int] | None = None  # the tokens [start, stop) of what is left are the corpus
    dtype: str | None = None  # token type of headerless files; None takes the format's default
    eot: int | None = None  # id of the end-of-text token; None takes that of the sidecars of documents
    eot_at: str | None = None  # `first` or `last` token of documents; None: see `Corpus.eot_first`
    earlier: tuple[str, ...] = ()  # corpora served here that hold what this one held before
    tokenizer: str | None = None  # see `tokenizer_source`; None to look beside the shards
    mask: bool = True  # loss masks beside the shards belong to the corpus; else they are left out
    view: str | None = None  # path of a view: its documents are the corpus
    of: str | None = None  # with a view: the path as given, which may be the name of another corpus
    address: str | None = None  # where others can have it; None: where it comes from, see `address_of`
    license: str | None = None  # under which it may be used, as its owners say it

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
        name, fields = read_text(text)
        return cls(name=name, **fields).narrowed()

    @classmethod
    def from_table(cls, name: str, table: Mapping[str, Any], *, folder: Path, where: str = "") -> CorpusSpec:
        """Read the table `[corpora.NAME]` of a configuration file; its paths are relative to `folder`.

        `where` names the table in errors.
        """
        return cls(name=name, **read_table(table, folder, where)).narrowed()

    def narrowed(self) -> CorpusSpec:
        """Return the same corpus as a folder of its own, if it is one split of a corpus that `build` made.

        Tokenizer and recorded hashes of such a split lie in the split's folder.
        """
        folder = self.path / (self.split or "")
        if self.split is None or self.include or self.exclude or not (folder / MANIFEST).is_file():
            return self
        return dataclasses.replace(self, path=folder, split=None)

    def path_text(self, split: str | None = None) -> str:
        """Return the path as a shell takes it, escaped, with `#SPLIT` if there is one."""
        return shlex.quote(self._path_below((self.store or "") + escaped(str(self.path)), split))

    def address_below(self, root: str) -> str:
        """Return the address of these tokens, as `parse` takes it, if its files are below `root`."""
        options = {
            "dtype": self.dtype,
            "eot": self.eot,
            "exclude": ",".join(self.exclude) or None,
            "token_range": None if self.token_range is None else "{},{}".format(*self.token_range),
            "mask": None if self.mask else "no",
        }
        said = (f",{name}={value}" for name, value in options.items() if value is not None)
        return self._path_below(escaped(root), self.split) + "".join(said)

    def _path_below(self, root: str, split: str | None) -> str:
        patterns = (re.sub(r"[\\,#]", r"\\\g<0>", each) for each in self.include)
        below = (
            _CLASS.sub(lambda found: f"\\{found[1]}" if found[1] else found[0], each) for each in patterns
        )
        paths = [f"{root.rstrip('/')}/{each}" for each in below] or [root]
        return ",".join(paths) + ("" if split is None else f"#{split}")

    def command(self, name: str, **options: object) -> str:
        """Return a command about this corpus, as a shell takes it; options in the way of `PATH,eot=ID`."""
        given = {} if self.dtype is None else {"dtype": self.dtype}
        named = "".join(f",{key}={value}" for key, value in {**given, **options}.items())
        return f"corpus-server {name} {self.path_text(self.split)}{named}"

    def index_command(self) -> str:
        """Return the command that finds the documents; `ID` stands where the spec says no end-of-text id."""
        return self.command("index", eot="ID" if self.eot is None else self.eot)


def with_views(specs: Iterable[CorpusSpec]) -> tuple[CorpusSpec, ...]:
    """Return the corpora of one configuration, in which views of others have the files of those."""
    every = tuple(specs)
    plain = {spec.name: spec for spec in every if spec.view is None}
    for spec in every:
        if spec.of in plain and (
            given := [name for name in _OF_FILES if getattr(spec, name) != _left_out(name)]
        ):
            raise InvalidParameter(
                f"corpus {spec.name!r} is a view of {spec.of!r}, which is served, and is read as that one; "
                f"give {', '.join(given)} to {spec.of!r}, or name the view's corpus by its path",
                parameter=given[0],
            )
    return tuple(
        dataclasses.replace(
            plain[spec.of],
            name=spec.name,
            view=spec.view,
            earlier=spec.earlier,
            address=spec.address,
            license=spec.license,
        )
        if spec.of in plain
        else spec
        for spec in every
    )


def _left_out(option: str) -> Any:
    """Return the value of a field that an option was not given for."""
    return next(each.default for each in dataclasses.fields(CorpusSpec) if each.name == option)
