"""What an integration costs beside the loader that it stands on."""

__all__ = ["feeds", "measuring"]
