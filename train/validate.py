"""The validation loss: each sequence once, and the same value for any number of ranks."""

from __future__ import annotations

import torch
from torch import nn

from ebbtide.train.agree import total
from ebbtide.train.generation import Generation
from ebbtide.train.loader import Sequences, share_out
from ebbtide.train.loss import Loss, count_tokens
from ebbtide.train.shard import reshard


def validation_loss(
    model: nn.Module,
    loss: Loss,
    dataset: Sequences,
    sequences: int,
    micro_sequences: int,
    generation: Generation,
    device: torch.device,
) -> float:
    """Mean loss over the unmasked tokens of the first ``sequences`` sequences, in nats.

    They are cut into micro-batches (the last may be smaller) that ranks share out as in training;
    sums are added in the order of the micro-batches.
    """
    wanted = range(min(sequences, dataset.num_sequences))
    micro_batches = [wanted[start:][:micro_sequences] for start in wanted[::micro_sequences]]
    sums = torch.zeros(len(micro_batches), dtype=torch.float64, device=device)
    tokens = torch.zeros((), dtype=torch.int64, device=device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for one in share_out(dataset, micro_batches, generation):
            value = loss(model(one.inputs.to(device)), one.labels.to(device))
            if one.number is not None:
                sums[one.number] = value
                tokens += count_tokens(one.labels)
    reshard(model)
    model.train(was_training)
    return float(sum(total(sums).tolist())) / max(int(total(tokens)), 1)
