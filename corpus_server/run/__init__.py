"""Processes and sockets: the supervisor, its workers, and where they listen."""

from corpus_server.run.supervisor import run

__all__ = ["run"]
