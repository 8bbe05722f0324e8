"""A digest sees every bit, wherever it lies, and does not see how a tensor is sharded."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ebbtide.train.digest import state_digests
from tests.train.ranks import Ranks


def digests(sharded: bool) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    draw = torch.Generator().manual_seed(0)
    state = {
        "matrix": torch.randn(7, 5, generator=draw),
        "half": torch.randn(3, 2, 2, generator=draw).bfloat16(),
        "vector": torch.randn(6, generator=draw),
    }
    if sharded:
        state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in state.items()}
    return state_digests(state | {"step": torch.tensor(3.0)})


def test_sharding_changes_nothing(ranks: Ranks) -> None:
    whole = ranks.run(1, digests, False)[0]
    assert len(set(whole.values())) == 4
    assert all(len(value) == 16 for value in whole.values())
    for world_size in (1, 2, 3, 4):
        assert all(found == whole for found in ranks.run(world_size, digests, True))


def changed() -> list[str]:
    values = torch.ones(4, 3)
    found = [state_digests({"t": values})["t"]]
    for row in range(4):
        for column in range(3):
            other = values.clone()
            other.view(torch.int32)[row, column] ^= 1  # the last bit
            found.append(state_digests({"t": other})["t"])
    zero = torch.zeros(2)
    found += [state_digests({"t": zero})["t"], state_digests({"t": -zero})["t"]]
    found.append(state_digests({"t": torch.tensor([1.0, 2.0])})["t"])
    found.append(state_digests({"t": torch.tensor([2.0, 1.0])})["t"])
    return found


def test_one_bit_or_two_elements_exchanged_change_it(ranks: Ranks) -> None:
    found = ranks.run(1, changed)[0]
    assert len(set(found)) == len(found)
