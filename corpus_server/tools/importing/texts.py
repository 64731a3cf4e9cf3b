"""The text of a configuration: JSON or YAML, or words of a command line."""

from __future__ import annotations

import re
from typing import Any, Final

from corpus_server.errors import InvalidParameter
from corpus_server.extras import optional_package
from corpus_server.user_files import GivenTwice, parse_json

_MAPPING: Final = re.compile(r"(?:\s*(?:#.*|---)?\n)*\s*(?:\{|[\"']?[A-Za-z_][\w-]*[\"']?\s*:(?:\s|$))")
"""How an object of JSON or YAML begins, after comments."""


def is_object(text: str) -> bool:
    """Tell whether a text looks like an object of JSON or YAML."""
    return _MAPPING.match(text) is not None


def read_object(text: str) -> dict[str, Any]:
    """Return the object that a text of JSON or YAML holds."""
    try:
        found = _parsed(text)
    except GivenTwice as error:
        raise InvalidParameter(f"the configuration: {error}", parameter="file") from error
    if not isinstance(found, dict):
        raise InvalidParameter.expected("file", "an object of JSON or YAML", found)
    return found


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except GivenTwice:
        raise
    except ValueError as error:
        return _yaml(text, error)


def _yaml(text: str, not_json: ValueError) -> Any:
    yaml = optional_package("yaml", extra="configs", purpose=f"A configuration that is no JSON ({not_json})")

    class OnceEach(yaml.SafeLoader):  # type: ignore[name-defined,misc]
        """Refuses a mapping that gives a key twice, of which YAML takes the last value."""

        def compose_mapping_node(self, anchor: str | None) -> Any:
            node = super().compose_mapping_node(anchor)
            names = set[str]()
            for key, _ in node.value:  # those of the text: `<<` is not resolved yet
                if isinstance(key, yaml.ScalarNode):
                    if key.value in names:
                        raise GivenTwice(
                            f"{key.value!r:.80} is given twice, in line {key.start_mark.line + 1}, too"
                        )
                    names.add(key.value)
            return node

    try:
        return yaml.load(text, OnceEach)
    except (yaml.YAMLError, RecursionError) as error:
        shown = re.sub(r"\s+", " ", str(error))
        raise InvalidParameter(
            f"the configuration must be JSON or YAML: {shown}", parameter="file"
        ) from error
