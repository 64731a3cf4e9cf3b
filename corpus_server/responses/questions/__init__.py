"""What can be asked, a file for each kind of thing; importing this package registers all questions."""

from corpus_server.responses.questions import listed, lookup, plans, ranges, recorded, reports, rows, samples

__all__ = ["listed", "lookup", "plans", "ranges", "recorded", "reports", "rows", "samples"]
