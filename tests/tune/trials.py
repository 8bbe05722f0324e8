"""Trial functions that behave, and that misbehave in every way a trial can."""

from __future__ import annotations

import builtins
import decimal
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ebbtide.tune.trial import Context, Metrics, Report

Values = dict[str, Any]


def fine(base: Values, values: Values, report: Report) -> Metrics:
    """Three reports; the loss is a pure function of the learning rate, best at 0.01."""
    loss = abs(values["optimizer.lr"] - 0.01)
    for step in (1, 2, 3):
        report({"step": step, "validation_loss": loss + 1 / step})
    return {"step": 3, "validation_loss": loss}


def torch_fit(base: Values, values: Values, report: Report) -> Metrics:
    """A little real training, to compare bit by bit."""
    import torch

    torch.manual_seed(base["seed"])
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=values["optimizer.lr"])
    inputs = torch.randn(64, 8)
    for step in range(1, 6):
        loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report({"step": step, "validation_loss": loss.item()})
    return {"step": 5, "validation_loss": loss.item()}


def leaky(base: Values, values: Values, report: Report) -> Metrics:
    """Says whether an earlier trial has left something of a ``kind`` behind, then leaves it."""
    import torch

    import ebbtide.tune.trial as module

    kind = values["kind"]
    number = torch.get_num_threads()
    draws = [random.random(), float(np.random.random()), torch.rand(1).item()]
    found = {
        "environment": "LEFT" in os.environ,
        "module": hasattr(module, "left"),
        "builtin": hasattr(builtins, "left"),
        "dtype": torch.get_default_dtype() != torch.float32,
        "folder": not Path("trials.py").exists(),
        "threads": number != 1,
        "decimals": decimal.getcontext().prec != 28,
        "gradients": not torch.is_grad_enabled(),
        "signals": signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL,
        "path": "left" in sys.path,
    }
    os.environ["LEFT"] = "1"
    setattr(module, "left", True)  # noqa: B010  (mypy knows no such attribute)
    setattr(builtins, "left", True)  # noqa: B010
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    decimal.getcontext().prec = 3
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    sys.path.append("left")
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    os.chdir("/")
    names = ("python", "numpy", "torch")
    return {"validation_loss": float(found[kind]), **dict(zip(names, draws, strict=True))}


def misbehave(base: Values, values: Values, report: Report) -> Metrics:
    """One misdeed by seed; ``data.uri`` names a folder where each leaves a mark when tried."""
    kind = MISDEEDS[values["seed"]]
    marks = Path(base["data"]["uri"])
    marks.mkdir(exist_ok=True)
    tries = sum(path.name.startswith(f"{kind}-") for path in marks.iterdir())
    (marks / f"{kind}-{tries}").touch()
    report({"step": 1, "validation_loss": 1.0})
    if kind == "raises":
        raise ValueError("the learning rate is cursed")
    if kind == "exits once" and tries == 0:
        os._exit(1)
    if kind == "sys.exits once" and tries == 0:
        sys.exit(0)
    if kind == "always exits":
        os._exit(3)
    if kind == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hangs":
        while True:
            pass
    if kind == "leaves a process":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "left-behind"])
        os._exit(4)
    if kind == "kills the zygote" and tries == 0:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if kind == "kills the evaluator" and tries == 0:
        os.kill(_parent(os.getppid()), signal.SIGKILL)
        time.sleep(60)
    outcome = {"is nan": float("nan"), "is inf": float("inf"), "reports nothing": None}
    if kind in outcome:
        value = outcome[kind]
        return {"step": 2} if value is None else {"step": 2, "validation_loss": value}
    return {"step": 2, "validation_loss": 0.2 + values["seed"] / 100}


def slow(base: Values, values: Values, report: Report) -> Metrics:
    """Marks ``data.uri`` with its process id and goes on for a minute, reporting."""
    folder = Path(base["data"]["uri"])
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    for step in range(1, 601):
        report({"step": step, "validation_loss": 1.0 / step})
        time.sleep(0.1)
    return {"step": 601, "validation_loss": 0.0}


def halving(base: Values, values: Values, report: Report) -> Metrics:
    """The seed is the loss: easy to rank at every rung."""
    for step in range(1, base["steps"] + 1):
        report({"step": step, "validation_loss": float(values["seed"])})
    return {"step": base["steps"], "validation_loss": float(values["seed"])}


def counted(base: Values, values: Values, report: Report) -> Metrics:
    """Leaves a byte in ``data.uri`` at its start and at its end; the seed is the loss."""
    folder = Path(base["data"]["uri"])
    folder.mkdir(exist_ok=True)

    def mark(what: str) -> None:
        with (folder / f"{what}-{values['seed']}").open("a") as file:
            file.write(".")

    mark("started")
    for step in range(1, base["steps"]):
        report({"step": step, "validation_loss": float(values["seed"])})
        time.sleep(0.02)
    mark("finished")
    return {"step": base["steps"], "validation_loss": float(values["seed"])}


def pauses(base: Values, values: Values, report: Report) -> Metrics:
    """Its only result comes after ``pause_s``."""
    time.sleep(values["pause_s"])
    return {"step": 1, "validation_loss": 0.0}


def _parent(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


MISDEEDS = [
    "behaves",
    "raises",
    "is nan",
    "is inf",
    "reports nothing",
    "exits once",
    "sys.exits once",
    "always exits",
    "is killed",
    "hangs",
    "leaves a process",
    "kills the zygote",
    "kills the evaluator",
]


def user(config: Values, context: Context) -> Metrics | None:
    """As a user writes one: the loss falls with every step, to the distance from 0.3."""
    for step in range(1, config.get("rounds", 9) + 1):
        context.report({"loss": abs(config["width"] - 0.3) + 1 / step})
        time.sleep(config.get("pause_s", 0.0))
    return None


def user_at_once(config: Values, context: Context) -> Metrics | None:
    """Without a report; momentum is only there with one of two optimizers."""
    if config["optimizer"] == "adam" and "momentum" in config:
        raise ValueError("adam has no momentum")
    return {"loss": config.get("momentum", 0.5), "number": context.number}


def climbs(config: Values, context: Context) -> Metrics | None:
    """Adds its speed to its total at every step; the loss is what is missing to 1000.

    ``marks`` is a folder with a byte for every start, and for every step. If that has a file
    ``kill``, the first trial that goes on from another's state ends its evaluator.
    """
    marks = Path(config["marks"])
    with (marks / f"started-{context.number}").open("a") as file:
        file.write(".")
    done, total = context.state or (0, 0.0)
    for step in range(done + 1, config["rounds"] + 1):
        with (marks / f"steps-{context.number}").open("a") as file:
            file.write(".")
        total += config["speed"]
        context.report({"loss": 1000 - total}, state=lambda: (step, total))  # noqa: B023
        if context.state is not None and (marks / "kill").exists():
            (marks / "kill").unlink()
            os.kill(_parent(os.getppid()), signal.SIGKILL)
            time.sleep(60)
        time.sleep(config.get("pause_s", 0.0))
    return None


def size(model: Any, job: Any) -> float:
    """A scorer: the number of parameters."""
    return float(sum(each.numel() for each in model.parameters()))


def broken(model: Any, job: Any) -> float:
    """A scorer that fails."""
    return 1 / 0


def hoards(base: Values, values: Values, report: Report) -> Metrics:
    """Takes memory without end."""
    held = []
    while True:
        held.append(np.ones(1 << 22))
