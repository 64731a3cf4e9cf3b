"""From requests to batches on the device: the slots, the thread that fills them, the copies."""
