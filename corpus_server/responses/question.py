"""What can be asked of corpora and plans under `/v1`, how a question is declared.

The application makes its routes of `QUESTIONS`; the command line asks the same functions without a server.

Numbers in a query are decimal digits and nothing else: no sign, no `1e3`, no `true`, so that a typing error
never trains on something else. Unknown parameters are refused for the same reason. Pydantic's own code checks
all that; a Python function for each number would be called several times for every batch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, permutations
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, GetPydanticSchema, create_model
from pydantic_core import CoreSchema, core_schema

from corpus_server.plan.declared import Schema
from corpus_server.plan.document import INLINE_PLAN
from corpus_server.plan.stage import MAX_STEP
from corpus_server.plan_store import PLAN_ID_PATTERN
from corpus_server.responses.response import FORMATS, ChecksumPlace, Format, Response
from corpus_server.work import Limits

LIMITS: Final = Limits(rows=2**22, num_bytes=2**30, seconds=30)
"""Of a question that has none of its own. Rows: what 16 MiB, the size that the client asks for, hold of the
shortest windows, located in about a second. Bytes: half a second of reading from the page cache."""

Make = TypeVar("Make", bound=Callable[..., Response])


def _checked(schema: CoreSchema, accepted: str, described: dict[str, Any]) -> GetPydanticSchema:
    refusing = core_schema.custom_error_schema(
        schema,
        "parameter",
        custom_error_message="must be {accepted}",
        custom_error_context={"accepted": accepted},
    )
    return GetPydanticSchema(lambda *_: refusing, lambda *_: {**described})  # pydantic adds to it


def integer(low: int, high: int) -> GetPydanticSchema:
    """Return the metadata of an integer parameter in [low, high], spelled in decimal digits."""
    digits = core_schema.str_schema(pattern="^[0-9]{1,20}$", strict=True)
    schema = core_schema.chain_schema([digits, core_schema.int_schema(ge=low, le=high)])
    described = {"type": "integer", "minimum": low, "maximum": high}
    return _checked(schema, f"an integer in [{low}, {high}]", described)


def names(known: Iterable[str]) -> GetPydanticSchema:
    """Return the metadata of a text parameter: some of `known`, each once, with commas between them."""
    known = tuple(known)
    some = chain.from_iterable(permutations(known, count + 1) for count in range(len(known)))
    accepted = [",".join(each) for each in some]
    return _checked(
        core_schema.literal_schema(accepted),
        f"some of {', '.join(known)}, each once, with commas between them",
        {"type": "string", "enum": accepted},
    )


Step = Annotated[int, integer(0, MAX_STEP)]
Token = Annotated[int, integer(0, 2**63 - 1)]
CorpusName = Annotated[str, Field(max_length=128)]
PlanId = Annotated[str, Field(pattern=PLAN_ID_PATTERN)]
RecordingName = Annotated[str, Field(max_length=255)]
ReportName = Annotated[str, Field(max_length=255)]


class QueryParameters(BaseModel):
    """Base of all query parameters: only the declared ones, each a string, described below its name."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Remember the names, for whoever misspells one."""
        NAMES_OF_QUERY[cls.__name__] = [field.alias or name for name, field in cls.model_fields.items()]


NAMES_OF_QUERY: Final[dict[str, list[str]]] = {"QueryParameters": []}
"""Names of the parameters by class, which pydantic's errors name."""


class StepQuery(QueryParameters):
    """Parameter of a route about one training step of a plan."""

    step: Step
    """Training step."""


class FormatQuery(QueryParameters):
    """Parameters of a route that answers tokens."""

    format: Format | None = None
    """Format of the body; without it the `Accept` header decides."""
    checksum: ChecksumPlace = "true"
    """Place of the checksum. `true`: in `Corpus-Checksum`; everything is read before the first byte is sent.
    `tail`: the last 8 bytes of the body (raw only). `false`: none."""


def _parameter(schema: Schema) -> tuple[Any, Any]:
    """Return the annotation and the field of a parameter that may be left out."""
    annotation: Any = str
    if schema.get("type") == "integer":
        annotation = Annotated[int, integer(schema["minimum"], schema["maximum"])]
    elif "enum" in schema:
        annotation = Literal[tuple(schema["enum"])]
    return annotation | None, Field(
        None, description=schema["description"], max_length=schema.get("maxLength")
    )


class PlanQuery(QueryParameters):
    """A plan by its id, or spelled inline, by parameters that `corpus_server.plan.document` declares."""

    plan: PlanId | None = Field(
        None, description=f"Id of a plan, or how it begins; without it, {', '.join(INLINE_PLAN)} spell one."
    )
    corpus: str | None = None


if not TYPE_CHECKING:
    spelled = {name: _parameter(schema) for name, schema in INLINE_PLAN.items()}
    PlanQuery = create_model("PlanQuery", __base__=PlanQuery, **spelled)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A route and the function that answers it.

    Args:
        path: with the names of the function's parameters.
        make: gets `service`, `query`, `request`, `budget` and what the path names; its docstring describes
            the route.
        response: the type of what is sent as JSON.
        array: what is answered in one of `formats`, instead.
        is_tagged: whether the response has an `ETag`.
        limits: what one may use.
        is_token_path: whether gather threads answer it, and slots count it: tokens read piece by piece.
            All others compute in turns.
    """

    path: str
    make: Callable[..., Response]
    response: Any = None
    array: str = ""
    formats: tuple[Format, ...] = FORMATS
    is_tagged: bool = False
    limits: Limits = LIMITS
    is_token_path: bool = False

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


def question(path: str, response: Any = None, **more: Any) -> Callable[[Make], Make]:
    """Register a function as what answers a route; see `Question`."""

    def register(make: Make) -> Make:
        QUESTIONS.append(Question(path=path, make=make, response=response, **more))
        return make

    return register
