"""GPT-2 and a training step of it: what a data loader has to keep busy."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone knows it by
from torch import Tensor, nn

from scripts.gpu_lib.full_slots import Pair


class Size(NamedTuple):
    """Size of a GPT; vocab_size is a multiple of 64, as nanoGPT has it."""

    layers: int
    heads: int
    width: int
    vocab_size: int = 50_304


GPT2_124M = Size(layers=12, heads=12, width=768)
TINY = Size(layers=1, heads=2, width=16)


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """x: `(rows, seq_len, width)`."""
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        added: Tensor = self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return x + added


class GPT(nn.Module):
    """Return the loss of inputs and targets; output and input embedding are one."""

    def __init__(self, size: Size, seq_len: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab_size, size.width)
        self.positions = nn.Parameter(0.02 * torch.randn(seq_len, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """inputs, targets: `(rows, seq_len) int64`."""
        x = self.tokens(inputs) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Trainer:
    """A model, its optimizer and a step: bf16 and compiled on a GPU, else plain."""

    def __init__(self, device: torch.device, size: Size, seq_len: int) -> None:
        is_cuda = device.type == "cuda"
        torch.manual_seed(0)
        model = GPT(size, seq_len).to(device)
        self.num_parameters = sum(each.numel() for each in model.parameters())
        self._optimizer = torch.optim.AdamW(model.parameters(), 3e-4, fused=is_cuda)
        self._loss: Any = torch.compile(model) if is_cuda else model
        self._precision: Any = torch.autocast("cuda", torch.bfloat16) if is_cuda else contextlib.nullcontext()

    def __call__(self, batch: Pair) -> Tensor:
        """Queue a step; return its loss, which nobody has waited for."""
        with self._precision:
            loss: Tensor = self._loss(*batch)
        torch.autograd.backward(loss)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()
