"""The same tiny trial for every contender of ``bench.tune``: one step of a small network."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


def one_step(lr: float) -> float:
    """The loss after the step."""
    import torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    inputs = torch.randn(64, 32)
    loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def pooled(config: dict[str, Any], context: Any) -> dict[str, float]:
    """For ebbtide's pool."""
    at_s = time.time()
    loss = one_step(config["lr"])
    return {"loss": loss, "at_s": at_s, "body_s": time.time() - at_s}


def counted(config: dict[str, Any], context: Any) -> dict[str, float]:
    """The same, with a mark at its start and at its end."""
    name = f"{config['lr']:.17f}"
    with Path(config["marks"], f"{name}.started").open("a") as file:
        file.write(".")
    found = pooled(config, context)
    Path(config["marks"], f"{name}.ended").touch()
    return found


def vanilla(config: dict[str, Any]) -> None:
    """For Ray Tune as it comes: a process for each trial."""
    from ray import tune

    tune.report({"loss": one_step(config["lr"])})


def reusable() -> type:
    """For Ray Tune with ``reuse_actors``: a class that takes a new configuration."""
    from ray import tune

    class Reusable(tune.Trainable):  # type: ignore[misc]  # Ray is untyped
        def setup(self, config: dict[str, Any]) -> None:
            self._lr = config["lr"]

        def step(self) -> dict[str, Any]:
            return {"loss": one_step(self._lr), "done": True}

        def reset_config(self, new_config: dict[str, Any]) -> bool:
            self.setup(new_config)
            return True

    return Reusable
