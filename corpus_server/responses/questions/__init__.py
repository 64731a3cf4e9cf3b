"""What can be asked, a file for each kind of thing; importing this package registers all questions."""

from corpus_server.responses.questions import lookup, plans, ranges, recorded, rows, samples

__all__ = ["lookup", "plans", "ranges", "recorded", "rows", "samples"]
