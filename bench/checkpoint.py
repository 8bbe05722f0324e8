"""What saving costs a run, against torch DCP as one would use it by hand.

``python -m bench.checkpoint --json`` trains a Llama of 5 million parameters with two ranks in plain
processes and saves to a real S3 server (SeaweedFS) on the same two cores. It prints one line of
JSON last:

- ``stall_percent_every_10``, ``stall_percent_every_step``: time for which the loop waited for saves
  over the time of the steps, saving every ten steps and every step.
- ``stored_percent_every_step``: of the saves asked for every step, how many the storage was fast
  enough for; the others were left out.
- ``stall_s``, ``sync_s3_stall_s``, ``async_save_stall_s``: the wait for one save: ours;
  ``dcp.save`` and an upload; ``dcp.async_save`` to a local folder (not uploaded). Medians.
- ``stall_ratio_sync_s3``: ``sync_s3_stall_s`` over ``stall_s``.
- ``throughput_loss_percent``: steps that take longer because of saves every ten steps, all told.
- ``commit_s``: from the begin of a save to its commit. Median.
- ``memory_stall_percent_every_step``, ``memory_throughput_loss_percent``: the same with a copy into
  the nodes' memory after every step.
- ``restore_memory_s``, ``restore_disk_s``, ``restore_s3_s``: loading the newest state. Medians.
- ``step_s``: a step without saves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.job import make_job
from bench.ranks import run_ranks
from ebbtide.platform.local_s3 import LocalS3
from ebbtide.train.config import TrainConfig

if TYPE_CHECKING:
    from ebbtide.train.loop import Training
    from ebbtide.train.saver import Saver

WARM_UP, BLOCK = 3, 10
NODES = ("bench-a", "bench-b")


def in_turns(config: TrainConfig) -> dict[str, list[float]]:
    """Ten steps without a save, ten with one after the first of them, and so on: seconds.

    In turns, so that what else the machine does is in both.
    """
    from ebbtide.train.peers import Moment

    training, saver = _training(config)
    found: dict[str, list[float]] = {"without": [], "with": [], "stalls": [], "commits": []}
    for number in range(config.steps):
        turn = "with" if number // BLOCK % 2 else "without"
        start_s = time.perf_counter()
        training.step.run(number)
        if turn == "with" and number % BLOCK == 0:
            begin_s = time.perf_counter()
            saver.begin(Moment(number + 1, 0, None, None))
            found["stalls"].append(time.perf_counter() - begin_s)
        found["commits"] += [saved.took_s for saved in saver.take()]
        if number >= WARM_UP:
            found[turn].append(time.perf_counter() - start_s)
        if number % BLOCK == BLOCK - 1:
            found["commits"] += [saved.took_s for saved in saver.wait()]
    training.step.loader.close()
    return found


def every_step(config: TrainConfig) -> dict[str, Any]:
    """Steps with saves of ours, as the job says: seconds of steps, stalls and commits."""
    import torch.distributed as dist

    from ebbtide.train.peers import Moment
    from ebbtide.train.step import Wishes

    training, saver = _training(config)
    steps_s, stalls_s, commits_s = [], [], []
    for number in range(config.steps):
        start_s = time.perf_counter()
        if dist.get_rank() == 0:
            training.step.wishes = Wishes(save=saver.wants_save(number + 1))
        if training.step.run(number).wishes.save:
            begin_s = time.perf_counter()
            saver.begin(Moment(number + 1, 0, None, None))
            stalls_s.append(time.perf_counter() - begin_s)
        commits_s += [saved.took_s for saved in saver.take()]
        steps_s.append(time.perf_counter() - start_s)
    commits_s += [saved.took_s for saved in saver.wait()]
    training.step.loader.close()
    return {"steps": steps_s[WARM_UP:], "stalls": stalls_s[1:], "commits": commits_s}


def _training(config: TrainConfig, nodes: Sequence[str] = ()) -> tuple[Training, Saver]:
    import torch

    from ebbtide.train.loop import Training
    from ebbtide.train.trial import Alone

    training = Training(
        config, 0, Alone(lambda report: None), torch.device("cpu"), checkpoints=True, nodes=nodes
    )
    assert training.saver is not None
    return training, training.saver


def restoring(config: TrainConfig) -> list[float]:
    """Seconds to load the newest checkpoint, three times."""
    import torch.distributed as dist

    training, _ = _training(config)
    seconds = []
    assert training.checkpoints is not None
    for _ in range(3):
        dist.barrier()
        start_s = time.perf_counter()
        training.checkpoints.restore(training.state)
        seconds.append(time.perf_counter() - start_s)
    training.step.loader.close()
    return seconds


def remembering(config: TrainConfig) -> dict[str, list[float]]:
    """Ten steps without, ten with a copy into the nodes' memory after every one; and restoring."""
    import torch.distributed as dist

    from ebbtide.train import peers
    from ebbtide.train.peers import Moment

    training, saver = _training(config, NODES)
    checkpoints = training.checkpoints
    assert checkpoints is not None
    found: dict[str, list[float]] = {"without": [], "with": [], "stalls": [], "restores": []}
    share_copy = training.step.before_end

    def timed_share() -> None:
        begin_s = time.perf_counter()
        share_copy()
        found["stalls"].append(time.perf_counter() - begin_s)

    training.step.before_end = timed_share
    for number in range(config.steps):
        turn = "with" if number // BLOCK % 2 else "without"
        start_s = time.perf_counter()
        training.step.run(number)
        if turn == "with":
            begin_s = time.perf_counter()
            saver.keep(Moment(number + 1, 0, None, None))
            found["stalls"].append(time.perf_counter() - begin_s)
        if number >= WARM_UP:
            found[turn].append(time.perf_counter() - start_s)
    training.step.loader.close()
    saver.keep(Moment(config.steps, 0, None, None))  # waits until the last one is shared
    for _ in range(3):
        dist.barrier()
        start_s = time.perf_counter()
        moment = peers.restore(config.run_uri, NODES, training.state, checkpoints.job, 0)
        found["restores"].append(time.perf_counter() - start_s)
        assert moment is not None and moment.step == config.steps
    saver.forget()
    return found


def by_hand(config: TrainConfig, folder: str, saves: int) -> dict[str, list[float]]:
    """Stalls of ``dcp.save`` with an upload, and of ``dcp.async_save``, in the plain loop."""
    import boto3
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from bench.plain import PlainLoop

    loop = PlainLoop(config)
    client: Any = boto3.client("s3")
    bucket = config.storage.split("/")[2]
    found: dict[str, list[float]] = {"sync": [], "async": []}
    group = dist.new_group(backend="gloo")

    def state() -> dict[str, Any]:
        model, optimizer = get_state_dict(loop.model, loop.optimizer)
        return {"model": model, "optimizer": optimizer}

    def timed(kind: str, save: Callable[[str], Any]) -> Any:
        loop.step(0)
        dist.barrier()
        start_s = time.perf_counter()
        answer = save(str(Path(folder, f"{kind}-{len(found[kind])}")))
        found[kind].append(time.perf_counter() - start_s)
        return answer

    def save_and_upload(where: str) -> None:
        dcp.save(state(), checkpoint_id=where)
        for path in Path(where).glob(f"__{dist.get_rank()}_*"):
            client.upload_file(str(path), bucket, f"by-hand/{path.parent.name}/{path.name}")
        dist.barrier()

    for _ in range(saves):
        timed("sync", save_and_upload)
        future = timed(
            "async", lambda where: dcp.async_save(state(), checkpoint_id=where, process_group=group)
        )
        for _ in range(2):
            loop.step(0)
        future.result()
    return {kind: seconds[1:] for kind, seconds in found.items()}


def measure(folder: Path, server: LocalS3, is_short: bool) -> dict[str, float]:
    """All figures."""
    turns = 4 if is_short else 12

    def job(name: str, count: int, storage: str = f"s3://{server.bucket}/runs") -> TrainConfig:
        checkpoint = {"every": 1, "keep_last": 1}
        schedule = {"warmup_steps": 0}
        return make_job(
            folder,
            name=name,
            steps=count,
            storage=storage,
            checkpoint=checkpoint,
            schedule=schedule,
        )

    in_s3 = job("every-10", turns * BLOCK)
    every_10 = run_ranks(2, in_turns, in_s3)
    plain_s, with_s = statistics.mean(every_10["without"]), statistics.mean(every_10["with"])
    every_1 = run_ranks(2, every_step, job("every-1", count := turns * BLOCK // 3))
    disk = job("on-disk", 3, str(folder))
    run_ranks(2, every_step, disk)
    memory = run_ranks(2, remembering, job("memory", turns * BLOCK // 2))
    plain_memory_s = statistics.mean(memory["without"])
    hand = run_ranks(2, by_hand, job("by-hand", 1000), str(folder / "dcp"), 3 if is_short else 6)
    stall_s, sync_s = statistics.median(every_10["stalls"]), statistics.median(hand["sync"])
    return {
        "stall_percent_every_10": 100 * statistics.mean(every_10["stalls"]) / (plain_s * BLOCK),
        "stall_percent_every_step": 100 * sum(every_1["stalls"]) / sum(every_1["steps"]),
        "stored_percent_every_step": 100 * len(every_1["commits"]) / count,
        "stall_ratio_sync_s3": sync_s / stall_s,
        "stall_s": stall_s,
        "sync_s3_stall_s": sync_s,
        "async_save_stall_s": statistics.median(hand["async"]),
        "throughput_loss_percent": 100 * (with_s / plain_s - 1),
        "commit_s": statistics.median(every_10["commits"]),
        "memory_stall_percent_every_step": 100
        * sum(memory["stalls"])
        / (len(memory["with"]) * plain_memory_s),
        "memory_throughput_loss_percent": 100
        * (statistics.mean(memory["with"]) / plain_memory_s - 1),
        "restore_memory_s": statistics.median(memory["restores"]),
        "restore_disk_s": statistics.median(run_ranks(2, restoring, disk)),
        "restore_s3_s": statistics.median(run_ranks(2, restoring, in_s3)),
        "step_s": plain_s,
    }


def main() -> None:
    """Run the benchmark; ``--short`` for a quick look."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON last")
    parser.add_argument("--short", action="store_true", help="a third of the steps")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ebbtide-") as folder, LocalS3() as server:
        os.environ.update(server.environment)
        figures = measure(Path(folder), server, arguments.short)
    for name, value in figures.items():
        print(f"{name:26} {value:10.4f}")
    if arguments.json:
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
