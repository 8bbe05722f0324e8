"""What is sharded on its own, and what activation checkpointing leaves as it is."""

from __future__ import annotations

import torch
from torch import nn

from ebbtide.train.shard import blocks, checkpoint_activations


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for expert in self.experts:
            x = self.dropout(torch.tanh(expert(x)))
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.layers = nn.ModuleList([Block(), Block()])
        self.activations = nn.ModuleList([nn.GELU()])  # nothing to shard in it
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body.layers:  # type: ignore[union-attr]
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_blocks_are_the_outermost_repeated_parts() -> None:
    model = Net()
    assert list(blocks(model)) == list(model.body.layers)  # type: ignore[arg-type]
    assert list(blocks(nn.Linear(2, 2))) == []


def test_checkpointed_activations_give_the_same_gradients() -> None:
    gradients = []
    for again in (False, True):
        torch.manual_seed(0)
        model = Net()
        if again:
            checkpoint_activations(model)
        torch.autograd.backward(model(torch.ones(3, 4)).square().sum())
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
