"""Questions about a plan: look-ups, usage, differences."""

from corpus_server.plan.questions.diff import changed_fields, compare, count_equal_steps
from corpus_server.plan.questions.lookup import look_up
from corpus_server.plan.questions.usage import count_usage

__all__ = ["changed_fields", "compare", "count_equal_steps", "count_usage", "look_up"]
