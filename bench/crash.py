"""What a run can be started from after it was killed, at any moment, while it saves.

``python -m bench.crash --json`` has a process save to a real S3 server (SeaweedFS), one checkpoint
after the other, and kills it with SIGKILL at random moments, 200 times (``--short``: 20). After
each kill everything in storage is looked at, and a new process goes on from there. It prints one
line of JSON last:

- ``kills``: SIGKILLs that hit a process while it saved.
- ``torn_loads``: loads of the newest checkpoint that failed, or gave another state than was saved.
- ``lost_committed``: steps whose commit was told before the kill, and that were not there after it,
  nor a newer one.
- ``orphans_left``: unfinished checkpoints and uploads that are left after one more save.
- ``in_upload``, ``in_commit``, ``in_cleanup``: how many kills hit which part of a save.
- ``checkpoints_saved``: how many saves were finished in between.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.job import make_job
from ebbtide.platform.local_s3 import LocalS3
from ebbtide.platform.storage import Storage, open_storage
from ebbtide.train.config import TrainConfig
from ebbtide.train.manifest import FOLDER, MANIFEST, list_checkpoints, newest, verify

NUMBERS = 20_000
"""Of 4 bytes, in each of four tensors of the state."""

GRACE_S = 1.0
_LONGEST_S = 0.6
_SILENT_S = 120.0


def state_of(step: int) -> dict[str, Any]:
    """Tensors that only this step has."""
    import torch

    return {f"model.{name}": torch.full((NUMBERS,), float(step * 10 + name)) for name in range(4)}


def save_forever(config: TrainConfig, tell: Connection, saves: int | None = None) -> None:
    """Load what there is, check it, and save one step after the other. In a process of its own."""
    import torch
    import torch.distributed as dist

    from ebbtide.train.checkpoint import Checkpoints
    from ebbtide.train.peers import Moment
    from ebbtide.train.saver import Saver
    from ebbtide.train.trial import single_process_group

    torch.set_num_threads(1)
    with single_process_group(torch.device("cpu")):
        run = open_storage(config.run_uri)
        token = os.urandom(4).hex()
        checkpoints = Checkpoints(run, config, "data", token, {})
        state = state_of(0)
        found = checkpoints.restore(state)
        step = found[1].step if found is not None else 0
        right = state_of(step)
        is_right = all(bool(torch.equal(state[name], right[name])) for name in state)
        tell.send(("loaded", step, is_right))
        saver = Saver(checkpoints, state)
        while saves is None or saves > 0:
            step += 1
            for name, tensor in state_of(step).items():
                state[name].copy_(tensor)
            tell.send(("begins", step, True))
            saver.begin(Moment(step, 0, None, None), must=True)
            for saved in saver.wait():
                tell.send(("saved", saved.info.step, True))
            saves = None if saves is None else saves - 1
        dist.barrier()


class Figures:
    """What was seen so far."""

    def __init__(self, run: Storage) -> None:
        self._run = run
        self.told = 0
        self.counts = dict.fromkeys(
            ("kills", "torn_loads", "lost_committed", "orphans_left", "in_upload", "in_commit")
            + ("in_cleanup", "checkpoints_saved"),
            0,
        )

    def hear(self, what: str, step: int, is_right: bool) -> None:
        """A message of the process."""
        if what == "loaded":
            self.counts["torn_loads"] += not is_right
            self.counts["lost_committed"] += step < self.told
        if what == "saved":
            self.told = max(self.told, step)
            self.counts["checkpoints_saved"] += 1

    def look(self, begun: int) -> None:
        """After a kill while ``begun`` was saved."""
        self.counts["kills"] += 1
        found = newest(self._run)
        step = found.step if found is not None else 0
        self.counts["lost_committed"] += step < self.told
        if found is not None:
            self.counts["torn_loads"] += verify(self._run, found).state != "complete"
        keys = {info.key for info in self._run.list(f"{FOLDER}/")}
        mine = {key for key in keys if f"step-{begun:08d}-" in key}
        if step == begun:
            self.counts["in_cleanup"] += 1
        elif any(key.rpartition("/")[2].startswith("rank-") for key in mine):
            self.counts["in_commit"] += 1
        else:
            self.counts["in_upload"] += 1
        self.told = max(self.told, step)

    def count_orphans(self) -> None:
        """What is unfinished once a process has saved after the grace time."""
        broken = [info for info in list_checkpoints(self._run) if info.state != "complete"]
        uploads = self._run.uploads(f"{FOLDER}/")
        whole = {info.name for info in list_checkpoints(self._run) if info.state == "complete"}
        loose = {
            info.key.split("/")[1]
            for info in self._run.list(f"{FOLDER}/")
            if not info.key.endswith(MANIFEST)
        } - whole
        self.counts["orphans_left"] += max(len(broken), len(loose)) + len(uploads)


def round_of(config: TrainConfig, figures: Figures, draw: random.Random) -> None:
    """One process, killed at a random moment of a save; its first is seen through by luck only."""
    context = multiprocessing.get_context("forkserver")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=save_forever, args=(config, send), daemon=True)
    process.start()
    send.close()
    begun, kill_s = 0, None
    while kill_s is None or time.monotonic() < kill_s:
        limit_s = _SILENT_S if kill_s is None else max(0.0, kill_s - time.monotonic())
        if not receive.poll(limit_s):
            if kill_s is None:
                raise RuntimeError(f"the process has not begun to save within {_SILENT_S:g} s")
            break
        message = receive.recv()
        figures.hear(*message)
        if message[0] == "begins":
            begun = message[1]
            if kill_s is None:
                kill_s = time.monotonic() + draw.uniform(0.0, _LONGEST_S)
    process.kill()
    process.join()
    try:
        while receive.poll(0):
            message = receive.recv()
            figures.hear(*message)
            begun = message[1] if message[0] == "begins" else begun
    except EOFError:
        pass
    figures.look(begun)


def measure(folder: Path, server: LocalS3, kills: int, seed: int) -> dict[str, int]:
    """All figures."""
    config = make_job(
        folder,
        size="tiny",
        name="crash",
        steps=10**9,
        storage=f"s3://{server.bucket}/runs",
        checkpoint={"every": 1, "keep_last": 1, "grace_s": GRACE_S},
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ebbtide.train.saver", "ebbtide.platform.s3", "torch._dynamo"])
    figures, draw = Figures(open_storage(config.run_uri)), random.Random(seed)
    for number in range(kills):
        round_of(config, figures, draw)
        if (number + 1) % 10 == 0:
            print(f"{number + 1} kills: {figures.counts}", flush=True)
    time.sleep(GRACE_S + 1.0)  # the storage's clock counts whole seconds
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=save_forever, args=(config, send, 2), daemon=True)
    process.start()
    send.close()
    process.join(_SILENT_S)
    if process.exitcode != 0:
        raise RuntimeError("the process after the kills has failed; see its error above")
    while receive.poll(0):
        try:
            figures.hear(*receive.recv())
        except EOFError:
            break
    figures.count_orphans()
    return figures.counts


def main() -> None:
    """Run the benchmark; ``--short`` for a quick look."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON last")
    parser.add_argument("--short", action="store_true", help="20 kills instead of 200")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ebbtide-") as folder, LocalS3() as server:
        os.environ.update(server.environment)
        figures = measure(Path(folder), server, 20 if arguments.short else 200, arguments.seed)
    for name, value in figures.items():
        print(f"{name:20} {value:8}")
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
