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
        found = parse_json(text)
    except GivenTwice as error:  # YAML would take the last value
        raise InvalidParameter(f"the configuration: {error}", parameter="file") from error
    except ValueError as error:
        found = _yaml(text, error)
    if not isinstance(found, dict):
        raise InvalidParameter.expected("file", "an object of JSON or YAML", found)
    return found


def _yaml(text: str, not_json: ValueError) -> Any:
    yaml = optional_package("yaml", extra="configs", purpose=f"A configuration that is no JSON ({not_json})")
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        shown = re.sub(r"\s+", " ", str(error))
        raise InvalidParameter(
            f"the configuration must be JSON or YAML: {shown}", parameter="file"
        ) from error
