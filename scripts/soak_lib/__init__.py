"""The phases of `scripts/soak`."""
