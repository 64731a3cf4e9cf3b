"""The plan as a loader sees it: what it asks for, which rows are its own, where it goes on. No torch."""
