"""Plain processes that form a gloo group, for benchmarks without Ray: one thread a rank."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def _rank(
    rank: int,
    world_size: int,
    backend: str,
    store: str,
    send: Connection,
    job: Callable[..., Any],
    *args: Any,
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    answer = job(*args)
    if rank == 0:
        send.send(answer)
    dist.barrier()
    dist.destroy_process_group()


def carry_through_host() -> None:
    """Let gloo move GPU tensors, which it can only in part: by way of the host.

    For several ranks on one GPU, which NCCL refuses. It changes how bytes move, not the bytes.
    """
    import torch
    import torch.distributed as dist

    def carried(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            moved: list[tuple[torch.Tensor, torch.Tensor]] = []

            def to_host(value: Any) -> Any:
                if not isinstance(value, torch.Tensor) or not value.is_cuda:
                    return value
                moved.append((value, value.cpu()))
                return moved[-1][1]

            answer = original(
                *map(to_host, args), **{key: to_host(value) for key, value in kwargs.items()}
            )
            for there, here in moved:
                there.copy_(here)
            return answer

        return call

    for name in ("all_gather_into_tensor", "all_gather_single", "all_to_all_single", "all_reduce"):
        if hasattr(dist, name):
            setattr(dist, name, carried(getattr(dist, name)))


def run_ranks(world_size: int, job: Callable[..., T], *args: Any, backend: str = "gloo") -> T:
    """``job(*args)`` on every rank of a new group; rank 0's answer. Raises if a rank fails."""
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="ebbtide-ranks-") as folder:
        store = str(Path(folder, "store"))
        ranks = [
            context.Process(target=_rank, args=(rank, world_size, backend, store, send, job, *args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        send.close()
        try:
            answer: T = receive.recv()
        except EOFError:
            raise RuntimeError("a rank has failed; see its error above") from None
        finally:
            for process in ranks:
                process.join(60)
                process.kill()
    return answer
