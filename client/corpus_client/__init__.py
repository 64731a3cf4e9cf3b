"""Train from a corpus-server: pinned slots, non-blocking copies, exact resume."""

__version__ = "0.1.0"
