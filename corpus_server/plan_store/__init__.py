"""Plans that a server has seen, and those that continue them: one SQLite file in the state folder."""

from corpus_server.plan_store.store import (
    ID_DIGITS,
    PLAN_ID_FORM,
    PLAN_ID_PATTERN,
    PlanStore,
    StoredPlan,
    find_by_prefix,
)

__all__ = ["ID_DIGITS", "PLAN_ID_FORM", "PLAN_ID_PATTERN", "PlanStore", "StoredPlan", "find_by_prefix"]
