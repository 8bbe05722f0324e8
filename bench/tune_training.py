"""Real trainings with ASHA: a sweep on Ray Tune as it comes, and by ``ebbtide tune`` on its pool.

Both try the same values in the same order, on the same model, tokens, schedule and rungs. Ray
Tune's trial is the training as one would write it by hand with torch; ebbtide's is its own training
step. A part of :mod:`bench.tune`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.job import make_job
from ebbtide.platform import config as job_file
from ebbtide.platform.prices import Market, load_catalogue
from ebbtide.platform.storage import open_storage
from ebbtide.train.config import TrainConfig

RUNGS = 9
"""A trial is validated so often; ASHA's first rung is the first of them."""
SLOTS = 2
SWEEP = """\
base: train.yaml
name: training
num_samples: {trials}
space:
  optimizer.lr: {{loguniform: [1e-4, 3e-2]}}
  optimizer.weight_decay: {{uniform: [0.0, 0.2]}}
scheduler: asha
pool: {{size: 2}}
"""


@dataclass(frozen=True)
class Size:
    """So many trials of so many steps; a step takes about 0.25 s on one core."""

    trials: int
    steps: int


def write_job(folder: Path, size: Size) -> Path:
    """``train.yaml``, for both."""
    job = make_job(
        folder,
        size="small",
        steps=size.steps,
        batch={"global_sequences": 4, "micro_sequences": 4},
        schedule={"warmup_steps": size.steps // 18},
        validation={"every_steps": size.steps // RUNGS, "sequences": 16},
    )
    path = folder / "train.yaml"
    path.write_text(job_file.dump(job))
    return path


def by_hand(config: dict[str, Any]) -> None:
    """The training as a trial of Ray Tune."""
    import torch
    from ray import tune
    from torch.nn.functional import cross_entropy
    from transformers import AutoConfig, AutoModelForCausalLM

    from ebbtide.train.dataset import TokenDataset
    from ebbtide.train.loader import read_sequences
    from ebbtide.train.optim import learning_rate
    from ebbtide.train.order import SampleOrder

    job = TrainConfig.model_validate(config["job"])
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.model.source))
    decay = config["optimizer.weight_decay"]
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim >= 2) == is_matrix], **options}
        for is_matrix, options in ((True, {"weight_decay": decay}), (False, {"weight_decay": 0.0}))
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, job.optimizer.beta2), fused=True)
    length, batch = job.data.sequence_length, job.batch.global_sequences
    data = TokenDataset(job.data.uri, "train", length)
    order = SampleOrder(data.num_sequences, batch, job.seed)
    held_out = read_sequences(
        TokenDataset(job.data.uri, "validation", length), range(job.validation.sequences)
    )

    def mean_loss(inputs: Any, labels: Any) -> Any:
        logits = model(inputs, use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), labels.flatten())

    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config["optimizer.lr"], job.schedule, step, job.steps)
        mean_loss(*read_sequences(data, order.sample_ids(step))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % job.validation.every_steps == 0:
            with torch.no_grad():
                loss = float(mean_loss(*held_out))
            tune.report({"step": step + 1, "validation_loss": loss})


def ray_tune(size: Size, folder: Path) -> dict[str, Any]:
    """The sweep on Ray Tune, in this process; every report with its time."""
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    import ray
    from ray import tune

    reports: list[dict[str, Any]] = []

    class Listener(tune.Callback):  # type: ignore[misc]  # Ray is untyped
        def on_trial_result(self, trial: Any, result: dict[str, Any], **_: Any) -> None:
            values = {"lr": trial.config["optimizer.lr"], "at_s": time.time()}
            reports.append({**values, "step": result["step"], "loss": result["validation_loss"]})

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
    job = job_file.load(folder / "train.yaml", TrainConfig)
    results = tune.Tuner(
        by_hand,
        param_space={
            "optimizer.lr": tune.loguniform(1e-4, 3e-2),
            "optimizer.weight_decay": tune.uniform(0.0, 0.2),
            "job": job.model_dump(mode="json"),
        },
        tune_config=tune.TuneConfig(
            metric="validation_loss",
            mode="min",
            num_samples=size.trials,
            search_alg=tune.search.BasicVariantGenerator(random_state=0, max_concurrent=SLOTS),
            scheduler=tune.schedulers.ASHAScheduler(
                time_attr="step",
                max_t=size.steps,
                grace_period=size.steps // RUNGS,
                reduction_factor=3,
            ),
        ),
        run_config=tune.RunConfig(
            name="training", storage_path=str(folder), verbose=0, callbacks=[Listener()]
        ),
    ).fit()
    return {"reports": reports, "failed": results.num_errors}


def ebbtide(size: Size, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """The sweep by the command; the reports are in its journal."""
    from ebbtide.tune import journal

    file = folder / "training.yaml"
    file.write_text(SWEEP.format(trials=size.trials))
    command = [sys.executable, "-m", "ebbtide", "tune", str(file), "--json"]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found = json.loads(run.stdout)
    values: dict[int, float] = {}
    reports = []
    for event in journal.read(open_storage(found["uri"])).events:
        if event["event"] == "started":
            values[event["trial"]] = event["values"]["optimizer.lr"]
        elif event["event"] == "reported":
            metrics = event["metrics"]
            report = {"step": metrics["step"], "loss": metrics["validation_loss"]}
            reports.append({"lr": values[event["trial"]], "at_s": event["at_s"], **report})
    whole = [each["seconds"] for each in found["trials"] if each["status"] == "finished"]
    return {
        "reports": reports,
        "failed": sum(each["status"] == "failed" for each in found["trials"]),
        "usd": float(found["usd"]),
        "trial_s": statistics.median(whole),
    }


def best(found: dict[str, Any]) -> float:
    """The lowest loss of a sweep."""
    return min(float(report["loss"]) for report in found["reports"])


def seconds_to(loss: float, found: dict[str, Any]) -> float:
    """From the start of the sweep's command to its first report of so low a loss."""
    times = [report["at_s"] for report in found["reports"] if report["loss"] <= loss]
    return float(min(times) - found["called_at_s"])


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest relative difference of the losses of the same values at the same step."""
    other = {(each["lr"], each["step"]): each["loss"] for each in theirs["reports"]}
    pairs = [
        (each["loss"], other[each["lr"], each["step"]])
        for each in ours["reports"]
        if (each["lr"], each["step"]) in other
    ]
    return max(abs(a - b) / b for a, b in pairs)


def figures(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """What bench.tune tells of both. Either reserves the whole node for as long as its command
    runs."""
    loss = max(best(ours), best(theirs)) * (1 + 1e-6)  # the last digits are not the trial's
    price = load_catalogue().price("local-cpu", Market.SPOT)  # as its labels say
    assert price is not None
    usd_per_s = float(price) / 3600
    ours_s, theirs_s = seconds_to(loss, ours), seconds_to(loss, theirs)
    return {
        "training_trial_s": round(ours["trial_s"], 1),
        "training_best_loss": round(best(ours), 5),
        "vanilla_training_best_loss": round(best(theirs), 5),
        "training_loss_difference": float(f"{difference(ours, theirs):.1e}"),
        "training_to_best_s": round(ours_s, 1),
        "vanilla_training_to_best_s": round(theirs_s, 1),
        "training_vs_vanilla": round(theirs_s / ours_s, 2),
        "training_whole_s": round(ours["whole_s"], 1),
        "vanilla_training_whole_s": round(theirs["whole_s"], 1),
        "training_whole_vs_vanilla": round(theirs["whole_s"] / ours["whole_s"], 2),
        "training_usd": round(ours_s * usd_per_s, 6),
        "vanilla_training_usd": round(theirs_s * usd_per_s, 6),
        "training_booked_usd": round(ours["usd"], 6),
    }
