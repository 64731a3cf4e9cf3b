"""A memory-mapped token-corpus data service for language-model pretraining."""

__all__ = ["__version__"]

__version__ = "0.1.0"
