"""Who may work, for how long, and for whom: budgets, turns, and work that several wait for."""

from corpus_server.work.budget import Budget, ClientLeft, Later, Limits
from corpus_server.work.jobs import Jobs, shared
from corpus_server.work.turns import Turns

__all__ = ["Budget", "ClientLeft", "Jobs", "Later", "Limits", "Turns", "shared"]
