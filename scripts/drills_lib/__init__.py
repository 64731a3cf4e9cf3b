"""The drills of `scripts/drills`: each file of `drills/` is one, and the program knows them by that."""
