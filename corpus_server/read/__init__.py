"""From windows to bytes: gather, text, the wire."""
