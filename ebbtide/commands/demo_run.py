"""The demo, part by part: each is a command that a user would type."""

from __future__ import annotations

import json
import subprocess
import sysconfig
import urllib.request
from importlib import resources
from pathlib import Path
from typing import Any

from rich.console import Console

from ebbtide.commands.demo_chaos import Disturber, Plan
from ebbtide.commands.demo_shell import Shell, Stages
from ebbtide.commands.demo_summary import Summary, draw, tokens_per_s
from ebbtide.platform.chaos import Chaos
from ebbtide.platform.config import dump, load
from ebbtide.platform.errors import ServeError
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.local_nodes import LocalNodes
from ebbtide.platform.ports import free_ports
from ebbtide.platform.storage import join
from ebbtide.train.config import TrainConfig
from ebbtide.train.dataset import read_index
from ebbtide.train.events import read_events
from ebbtide.train.history import History

_NODES = 4
_VOCAB_SIZE = 4096
_PROMPT = "import os\n\n\ndef "
_COMPLETION_TOKENS = 32


class Demo:
    """Everything the demo makes lies under ``out``; ``steps`` is how long it trains."""

    def __init__(self, out: Path, steps: int, console: Console) -> None:
        self._out, self._steps, self._console = out, steps, console
        self._examples = Path(str(resources.files("ebbtide"))) / "examples" / "stdlib-lm"
        self._data, self._model = str(out / "data"), str(out / "model")

    def run(self) -> Summary:
        """From nothing to the summary; whatever happens, no process is left."""
        stages = Stages(self._console, 8)
        stages.begin("start a Ray cluster: one head, four spot nodes of one CPU")
        with (
            LocalCluster(nodes=_NODES) as cluster,
            Shell(self._console, cluster.environment) as shell,
        ):
            stages.begin("prepare real text: Python's standard library")
            self._prepare(shell)
            stages.begin("choose the learning rate by a sweep on warm evaluators")
            config = self._tune(shell, cluster)
            stages.begin("train; meanwhile a node is evicted, one killed and one added")
            done = self._train(shell, cluster, config)
            stages.begin("export the model for serving")
            exported = json.loads(
                shell.run("export", config.run_uri, "--out", self._model, "--json")
            )
            stages.begin("serve it by separate prefill and decode workers, and ask for text")
            completion = self._serve(shell, cluster)
            stages.begin("compare with transformers")
            expected = complete_with_transformers(self._model)
            stages.begin("count the dollars")
            cost = json.loads(shell.run("cost", config.run_uri, "--json"))
        events = read_events(config.run_uri)
        history = History(events)
        index = read_index(self._data)
        draw(self._out / "loss.png", events, done, index.unigram_entropy)
        steps = sorted(history.kept)
        if history.validation_loss is None:
            raise ServeError(f"{config.run_uri}: the run has no validation loss")
        return Summary(
            parameters=exported["parameters"],
            corpus_bytes=index.corpus_bytes,
            steps=len(steps),
            world_sizes=history.world_sizes,
            attempts=len(history.attempts),
            steps_lost_notice=history.steps_lost("notice"),
            steps_lost_kill=history.steps_lost("failure"),
            kill_to_step_s=done.kill_to_step_s,
            loss_first=history.kept[steps[0]].loss,
            loss_last=history.kept[steps[-1]].loss,
            valid_loss=history.validation_loss,
            unigram_entropy=index.unigram_entropy,
            tokens_per_s=tokens_per_s(history),
            cost_usd=cost["cost_usd"],
            cost_on_demand_usd=cost["cost_on_demand_usd"],
            learning_rate=config.optimizer.lr,
            completion=completion,
            completion_matches_transformers=completion == expected,
            demo_s=stages.elapsed_s,
        )

    def _prepare(self, shell: Shell) -> None:
        source = sysconfig.get_path("stdlib")
        arguments = [
            "data",
            "prepare",
            source,
            "--glob",
            "**/*.py",
            "--exclude",
            "site-packages/**",
        ]
        arguments += ["--exclude", "**/test/**", "--vocab-size", str(_VOCAB_SIZE)]
        shell.run(*arguments, "--out", self._data)

    def _write_job(self, name: str, *overrides: str) -> Path:
        """An example's training job with the demo's places in it."""
        config = load(self._examples / "train.yaml", TrainConfig, overrides)
        path = self._out / name
        path.write_text(dump(config))
        return path

    def _tune(self, shell: Shell, cluster: LocalCluster) -> TrainConfig:
        """Write the job, let the sweep choose its learning rate, and give the chosen job."""
        base = self._write_job(
            "base.yaml",
            f"storage={self._out / 'runs'}",
            f"data.uri={self._data}",
            f"model.source={self._examples / 'model.json'}",
            f"steps={self._steps}",
            f"validation.every_steps={max(1, self._steps // 4)}",
            "checkpoint.every=10",
            f"workers.max={_NODES}",
        )
        arguments = ["tune", str(self._examples / "tune.yaml"), "--set", f"base={base}"]
        arguments += ["--set", f"storage={self._out / 'sweeps'}", "--address", cluster.address]
        chosen = self._out / "train.yaml"
        self._console.print(shell.run(*arguments, "--out", str(chosen)), highlight=False)
        shell.run("tune", "pool", "down", "--address", cluster.address)
        return load(chosen, TrainConfig)

    def _train(self, shell: Shell, cluster: LocalCluster, config: TrainConfig) -> Any:
        job = str(self._out / "train.yaml")
        training = shell.start("train", job, "--address", cluster.address)
        tenth = config.steps // 10
        plan = Plan(notice_step=2 * tenth, kill_step=4 * tenth + 5, growth_step=6 * tenth)
        disturber = Disturber(
            Chaos(LocalNodes(cluster.address)),
            config.run_uri,
            training,
            lambda text: self._console.print(f"[bold yellow]⚡ {text}", highlight=False),
        )
        done = disturber.carry_out(plan)
        shell.finish(training)
        return done

    def _serve(self, shell: Shell, cluster: LocalCluster) -> str:
        arguments = ["serve", str(self._examples / "serve.yaml"), "--address", cluster.address]
        arguments += ["--set", f"model.uri={self._model}", "--set", f"http.port={free_ports(1)[0]}"]
        serving = shell.start(*arguments)
        endpoint = _first_line(serving)
        text = complete(endpoint, "stdlib-lm")
        shell.stop(serving)
        return text


def _first_line(process: subprocess.Popen[str]) -> str:
    line = process.stdout.readline().strip() if process.stdout is not None else ""
    if not line:
        raise ServeError("the endpoint did not come up; see above")
    return line


def complete(endpoint: str, model: str) -> str:
    """The greedy completion of the demo's prompt by an OpenAI-compatible endpoint."""
    body = {"model": model, "prompt": _PROMPT, "max_tokens": _COMPLETION_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        join(endpoint, "completions"),
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
        return text


def complete_with_transformers(model_dir: str) -> str:
    """The same by transformers alone, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    prompt = tokenizer(_PROMPT, return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(**prompt, max_new_tokens=_COMPLETION_TOKENS, do_sample=False)
    new = tokens[0, prompt["input_ids"].shape[1] :]
    text: str = tokenizer.decode(new, skip_special_tokens=True)
    return text
