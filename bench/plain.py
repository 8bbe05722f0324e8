"""Training as one would write it by hand with torch and FSDP2: what benchmarks compare with."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from ebbtide.train.config import TrainConfig


class PlainLoop:
    """The job's model, data and optimizer in fp32, on this rank of the default process group."""

    def __init__(self, config: TrainConfig) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(config.seed)
        rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model: nn.Module = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(config.model.source)
        )
        mesh = init_device_mesh("cpu", (self.world_size,))
        for layer in self.model.model.layers:  # type: ignore[union-attr, operator]
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        for part in self.model.modules():
            if hasattr(part, "set_gradient_divide_factor"):
                part.set_gradient_divide_factor(1.0)  # type: ignore[operator]
                part.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.optimizer.lr, fused=True
        )
        batch = config.batch.global_sequences
        shape = (64, batch, config.data.sequence_length + 1)
        draw = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, 4000, shape, generator=draw)[:, rank :: self.world_size]
        self.micro = config.batch.micro_sequences
        self.tokens_per_step = batch * config.data.sequence_length

    def step(self, number: int) -> float:
        """Forward, backward, clip, update; the mean loss over the global batch."""
        micro_batches = self.tokens[number % len(self.tokens)].split(self.micro)
        total = torch.zeros(())
        for index, ids in enumerate(micro_batches):
            last = index == len(micro_batches) - 1
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            loss = self._loss(ids) / self.tokens_per_step
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total)

    def _loss(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids[:, :-1], use_cache=False).logits
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
