"""A memory-mapped token-corpus data service for language-model pretraining."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corpus_server.in_background import background as background

__all__ = ["__version__", "background"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name != "background":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from corpus_server.in_background import background  # what it imports no server needs

    return background
