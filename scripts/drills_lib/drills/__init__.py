"""A file for each drill: its name, what it does (the first line), and what `Drill` says."""
