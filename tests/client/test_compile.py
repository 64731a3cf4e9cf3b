"""Compiled code sees batches of one kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from corpus_client import CorpusLoader

MakeLoader = Callable[..., CorpusLoader]


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_step_is_compiled_once(make_loader: MakeLoader) -> None:
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    counter = CompileCounter()

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (inputs.long() * 3 - targets.long()).sum()

    compiled = torch.compile(step, backend=counter, fullgraph=True)
    for batch in make_loader(num_steps=40):
        assert compiled(batch.inputs, batch.targets) == step(batch.inputs, batch.targets)
    assert counter.frame_count == 1
