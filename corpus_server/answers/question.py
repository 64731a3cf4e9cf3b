"""What can be asked of corpora and plans: the routes under `/v1` that are answered in slices.

The application makes its routes of `QUESTIONS`; the command line asks the same functions without a server.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar, get_type_hints

from pydantic import Field

from corpus_server.answers.response import FORMATS, Format, Response, Slices

Make = TypeVar("Make", bound=Callable[..., Slices[Response]])

CorpusName = Annotated[str, Field(max_length=128)]
PlanId = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A route and the function that answers it.

    Args:
        path: with the names of the function's parameters.
        make: gets `service`, `query`, `request` and what the path names; its docstring describes the route.
        answer: what is answered as JSON.
        array: what is answered in one of `formats`, instead.
        is_tagged: whether the response has an `ETag`.
    """

    path: str
    make: Callable[..., Slices[Response]]
    answer: Any = None
    array: str = ""
    formats: tuple[Format, ...] = FORMATS
    is_tagged: bool = False

    @property
    def parameters(self) -> dict[str, Any]:
        """Types of what the function is asked with: `query`, and what the path names."""
        hints = get_type_hints(self.make, include_extras=True)
        return {name: hints[name] for name in ("query", *re.findall(r"{(\w+)}", self.path))}

    @property
    def about(self) -> str:
        """The description of the route."""
        return inspect.getdoc(self.make) or ""

    def named_in(self, path: str) -> Mapping[str, str] | None:
        """Return what a path names, if it is one of this question."""
        found = re.fullmatch(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", self.path), path)
        return None if found is None else found.groupdict()


QUESTIONS: Final[list[Question]] = []
"""Those of the modules that were imported."""


def question(path: str, answer: Any = None, **more: Any) -> Callable[[Make], Make]:
    """Register a function as what answers a route; see `Question`."""

    def register(make: Make) -> Make:
        QUESTIONS.append(Question(path=path, make=make, answer=answer, **more))
        return make

    return register
