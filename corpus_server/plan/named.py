"""Declared objects of which a plan names one: its order, its rows.

One without fields is spelled by its name, `"sequential"`; one with fields as an object,
`{"shuffle": {"block_windows": 8, "group_blocks": 4}}`, or by its name where all fields have defaults.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from corpus_server.errors import InvalidParameter, InvalidPlan
from corpus_server.plan.declared import Declared, Kind, Schema, declared_fields, json_object
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.tables import Job, Lengths


class Named(Declared, ABC):
    """An object that a plan's document names.

    Attributes:
        plan_field: of the plan, that names it.
        name: in the document.
        sentence: for help: what it does.
        stated: what each must say besides its methods.
        is_inline: whether query parameters can spell it.
        has_table: whether rows follow from tables.
        digests_field: its field that holds digests of the documents' lengths by corpus, if these decide the
            tables; "" if they do not.
    """

    plan_field: ClassVar[str]
    name: ClassVar[str]
    sentence: ClassVar[str]
    stated: ClassVar[Sequence[str]] = ("name", "sentence")
    is_inline: ClassVar[bool] = True
    has_table: ClassVar[bool] = False
    digests_field: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "name"):
            cls.prefix = f"{cls.plan_field}.{cls.name}."
        super().__init_subclass__()

    @property
    def digests(self) -> Mapping[str, str]:
        """Digests of the documents' lengths by corpus; empty before the plan was bound."""
        digests: Mapping[str, str] = getattr(self, self.digests_field) if self.digests_field else {}
        return digests

    def digest_of(self, lengths: Lengths) -> str:
        """Return the digest of a corpus's documents that decides its rows."""
        return lengths.digest

    def with_digests(self, digests: Mapping[str, str]) -> Self:
        """Return the same with digests."""
        return replace(self, **{self.digests_field: digests}) if self.digests_field else self

    def jobs(
        self, lengths: Mapping[str, Lengths], *, seq_len: int, seed: int, decides: Mapping[str, Any]
    ) -> list[Job]:
        """Return the tables of a plan that its rows follow from.

        Args:
            lengths: by source, in the plan's order.
            decides: what decides the rows of the plan's stages alike, its sources and fingerprints.

        Raises:
            InvalidPlan: there can be no such table.
        """
        return []

    def __str__(self) -> str:
        return self.name

    def to_json(self, spell: Callable[[Ranges], Any] = Ranges.to_json) -> Any:
        """Return the canonical JSON."""
        return {self.name: Declared.to_json(self, spell)} if declared_fields(type(self)) else self.name

    @classmethod
    def schema(cls) -> Schema:
        """Return the JSON schema."""
        inner = super().schema()
        return json_object([cls.name], {cls.name: inner}) if declared_fields(cls) else {"const": cls.name}

    @classmethod
    def required(cls) -> list[str]:
        """Return the fields without a default."""
        found: list[str] = super().schema()["required"]
        return found

    @classmethod
    def inline_fields(cls) -> dict[str, Schema]:
        """Return the schemas of the query parameters that spell its fields."""
        return cls.properties()

    @classmethod
    def missing(cls) -> list[str]:
        """Return what it lacks to be registered."""
        return [*sorted(cls.__abstractmethods__), *(name for name in cls.stated if not hasattr(cls, name))]


N = TypeVar("N", bound=Named)


class Registry(Generic[N]):
    """The objects that a field of a plan may name. Code outside an object's file never names the object.

    Args:
        kinds: of one `plan_field`, in the order in which help and messages list them. The first is the
            default, and has no fields.

    Attributes:
        field: of the plan, and the query parameter.
        kind: of the field.
        inline: what the query parameter may be.
        inline_fields: schemas of the query parameters that objects have besides.

    Raises:
        TypeError: a kind lacks something; the error names it.
    """

    def __init__(self, *kinds: type[N]) -> None:
        for each in kinds:
            if missing := each.missing():
                raise TypeError(f"{each.plan_field} {each.__name__} lacks {', '.join(missing)}")
        self.field, self.kinds, self.default = kinds[0].plan_field, kinds, kinds[0]()
        self._by_name = {each.name: each for each in kinds if not each.required()}
        self._with_fields = {each.name: each for each in kinds if declared_fields(each)}
        self.kind = Kind({"anyOf": [each.schema() for each in kinds]}, self._take)
        self._inline = [each for each in kinds if each.is_inline]
        self.inline = tuple(dict.fromkeys(each.name for each in self._inline))
        self.inline_fields: dict[str, Schema] = {
            name: schema for each in self._inline for name, schema in each.inline_fields().items()
        }

    def __iter__(self) -> Iterator[type[N]]:
        return iter(self.kinds)

    def _accepted(self) -> str:
        spelled = [f"one of {', '.join(self._by_name)}"]
        for name, each in self._with_fields.items():
            if required := ", ".join(f'"{field}": ...' for field in each.required()):
                spelled.append(f'{{"{name}": {{{required}}}}}')
        return ", or ".join(spelled)

    def _take(self, what: str, value: object) -> N:
        if isinstance(value, self.kinds):
            return value
        if isinstance(value, str) and value in self._by_name:
            return self._by_name[value]()
        if (
            isinstance(value, Mapping)
            and len(value) == 1
            and (name := next(iter(value))) in self._with_fields
        ):
            return self._with_fields[name].from_json(value[name])
        raise InvalidPlan.expected(what, self._accepted(), value)

    def spelled(self, name: str | None, given: Mapping[str, Any]) -> N:
        """Make the object that query parameters spell.

        Args:
            name: None for the default.
            given: parameters of `inline_fields`.

        Raises:
            InvalidParameter: no object of that name has these parameters.
        """
        name = name or self.default.name
        for kind in self._inline:
            wanted = kind.inline_fields().keys()
            if wanted & given.keys() if given else kind.name == name:
                break
        else:
            raise InvalidParameter.expected(self.field, f"one of {', '.join(self.inline)}", name)
        if kind.name == name and set(kind.required()) <= given.keys() <= wanted:
            return kind(**given)
        received = ", ".join(f"{each} {given.get(each)}" for each in wanted)
        raise InvalidParameter(
            f"{' and '.join(wanted)} must be given{' together,' if len(wanted) > 1 else ''} with "
            f"{self.field} {kind.name}; got {received}, {self.field} {name}",
            parameter=self.field if kind.name != name else next(iter(wanted)),
        )
