"""The axes of the bench: every module here is one, with `HELP` and `measure(options) -> Report`."""
