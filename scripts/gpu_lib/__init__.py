"""`scripts/gpu`: what can only be shown with a GPU, or on many cores."""
