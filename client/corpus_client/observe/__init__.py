"""Where the time goes: measured by the loader itself, while it runs. No torch."""

__all__ = ["attribution", "progress", "telemetry", "trace"]
