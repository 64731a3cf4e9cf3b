"""Plans that a server has seen, and those that continue them: one SQLite file in the state folder."""

from corpus_server.plan_store.store import ID_DIGITS, PlanStore, StoredPlan, find_by_prefix

__all__ = ["ID_DIGITS", "PlanStore", "StoredPlan", "find_by_prefix"]
