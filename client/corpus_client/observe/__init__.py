"""Where the time goes: measured by the loader itself, while it runs. No torch."""
