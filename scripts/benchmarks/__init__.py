"""Benchmarks: ours beside the limits and the habits of the field, in one run."""
