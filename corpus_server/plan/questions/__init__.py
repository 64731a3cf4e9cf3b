"""Questions about a plan: look-ups, usage, differences."""

from corpus_server.plan.questions.diff import changed_fields, compare_slices, count_equal_steps
from corpus_server.plan.questions.lookup import look_up_slices
from corpus_server.plan.questions.usage import usage_slices

__all__ = ["changed_fields", "compare_slices", "count_equal_steps", "look_up_slices", "usage_slices"]
