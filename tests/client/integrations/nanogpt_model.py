"""The smallest model that computes its loss as nanoGPT and llm.c do."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - nanoGPT's name

from tests.client.integrations.ranks import VOCABULARY


class Model(torch.nn.Module):
    """An embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = torch.nn.Embedding(VOCABULARY, 16)
        self.lm_head = torch.nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.lm_head(self.wte(idx))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def copied(state: Any) -> Any:
    """Copy tensors, which go on changing."""
    return torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
