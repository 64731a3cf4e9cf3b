"""From requests to batches on the device: the slots, the thread that fills them, the copies."""

__all__ = ["device", "fetcher", "gather", "local", "opening", "options", "pipeline", "ring", "slots"]
