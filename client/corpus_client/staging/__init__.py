"""From requests to batches on the device: the slots, the thread that fills them, the copies."""

__all__ = [
    "fetcher",
    "gather",
    "local",
    "opening",
    "options",
    "pinning",
    "pipeline",
    "ring",
    "slots",
    "stager",
]
