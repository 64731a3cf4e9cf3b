"""A file per training framework; importing it imports the framework. docs/integrations.md has the lines."""

__all__ = [
    "accelerate",
    "causal_lm",
    "feed",
    "jax",
    "lightning",
    "litgpt",
    "llmc",
    "megatron",
    "micro",
    "nanogpt",
    "torchdata",
    "torchtitan",
    "transformers",
]
