"""Mutation testing: change one line of a copy of the tree, and see whether a test fails."""
