"""A memory-mapped token-corpus data service for language-model pretraining."""

__version__ = "0.1.0"
