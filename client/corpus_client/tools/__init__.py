"""Instruments of the `corpus-client` command: why a GPU waits for data, on this machine."""
