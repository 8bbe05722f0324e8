"""A job on Ray Train as it comes: elastic, FSDP2, a DCP checkpoint every few steps. A script.

``python -m bench.stock JOB.json STEPS_FILE ADDRESS EVERY``: appends a JSON line for every finished
step (``time_s``, ``step``, ``pid``), and goes on until it is killed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

import ray
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ebbtide.train.config import TrainConfig


def train_function(values: dict[str, Any]) -> None:
    """The loop that a user would write."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from bench.plain import PlainLoop

    torch.set_num_threads(1)
    loop = PlainLoop(TrainConfig.model_validate(values["job"]))
    first, restored = 0, ray.train.get_checkpoint()
    if restored is not None:
        model, optimizer = get_state_dict(loop.model, loop.optimizer)
        state = {"model": model, "optimizer": optimizer, "step": torch.zeros(())}
        with restored.as_directory() as folder:
            dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            loop.model, loop.optimizer, model_state_dict=model, optim_state_dict=optimizer
        )
        first = int(state["step"])
    for step in range(first, 10**9):
        loop.step(step)
        if ray.train.get_context().get_world_rank() == 0:
            with open(values["steps"], "a") as file:
                file.write(json.dumps([time.time(), step + 1, os.getpid()]) + "\n")
        if (step + 1) % values["every"] == 0:
            model, optimizer = get_state_dict(loop.model, loop.optimizer)
            state = {"model": model, "optimizer": optimizer, "step": torch.tensor(step + 1.0)}
            with tempfile.TemporaryDirectory() as folder:
                dcp.save(state, checkpoint_id=folder)
                ray.train.report({"step": step + 1}, Checkpoint.from_directory(folder))


def main() -> None:
    """Run until killed."""
    job, steps, address, every = sys.argv[1:]
    ray.init(address, log_to_driver=False)
    with open(job) as file, tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            train_function,
            train_loop_config={"job": json.load(file), "steps": steps, "every": int(every)},
            scaling_config=ScalingConfig(num_workers=(1, 2)),
            run_config=RunConfig(
                name="stock", storage_path=folder, failure_config=FailureConfig(max_failures=-1)
            ),
        ).fit()


if __name__ == "__main__":
    main()
