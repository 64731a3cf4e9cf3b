"""A small decoder-only transformer in the manner of GPT-2, short enough to read at a sitting."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The sizes of a GPT; `width` is split evenly among the heads."""

    vocab_size: int
    seq_len: int
    num_layers: int
    num_heads: int
    width: int

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"width must be divisible by num_heads, got {self.width} and {self.num_heads}")


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a norm and around a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attention_out = nn.Linear(config.width, config.width, bias=False)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp_in = nn.Linear(config.width, 4 * config.width, bias=False)
        self.mlp_out = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden, result: `(rows, length, width)`."""
        hidden = hidden + self._attend(self.attention_norm(hidden))
        expanded: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden))))
        return hidden + expanded

    def _attend(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        heads = self.query_key_value(hidden).view(rows, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (rows, heads, length, width / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(rows, length, width))
        return result


class GPT(nn.Module):
    """Learned positions, tied input and output embeddings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.seq_len, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self._initialise()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats. inputs, targets: `(rows, length) int64`, length at most seq_len."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        hidden = self.token_embedding(inputs) + self.position_embedding(positions)
        for block in self.blocks:
            hidden = block(hidden)
        logits = F.linear(self.norm(hidden), self.token_embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @property
    def num_parameters(self) -> int:
        """Trained numbers, the tied embedding once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def make_optimizer(self, learning_rate: float) -> torch.optim.AdamW:
        """AdamW that decays matrices only; norms and biases are left alone."""
        matrices = [parameter for parameter in self.parameters() if parameter.dim() >= 2]
        others = [parameter for parameter in self.parameters() if parameter.dim() < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            # GPT-2: layers that write into the residual start smaller, the deeper the network.
            is_residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
            scale = 1 / math.sqrt(2 * self.config.num_layers) if is_residual else 1.0
            nn.init.normal_(parameter, std=0.02 * scale)


def cosine_learning_rate(progress: float, *, peak: float) -> float:
    """Rise over the first 5 % of the run, then fall along a cosine to a tenth of the peak.

    progress: the part of the run that is done, 0 to 1.
    """
    warmup, floor = 0.05, 0.1
    if progress < warmup:
        return peak * max(progress / warmup, 0.02)
    decayed = min(1.0, (progress - warmup) / (1 - warmup))
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * decayed)))
