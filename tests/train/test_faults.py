"""What befalls a run beside evictions: a rank that stops, a batch that poisons, a slow poller."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ebbtide.platform.chaos import Chaos
from ebbtide.platform.chaos_deeds import Happening
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.local_nodes import LocalNodes
from ebbtide.train.config import TrainConfig
from ebbtide.train.dataset import TokenDataset
from ebbtide.train.driver import Progress
from ebbtide.train.events import Failed, Skipped, read_events
from ebbtide.train.history import History
from ebbtide.train.job import train
from ebbtide.train.loader import read_sequences
from ebbtide.train.order import SampleOrder
from tests.train.conftest import MakeConfig

pytestmark = [pytest.mark.ray, pytest.mark.slow]

BAD_STEP = 4
POLLER_STOP_S = 20.0

POISON = """
import time
import torch
from ebbtide.train.loss import cross_entropy

def mark(labels):
    return int((labels.flatten() * torch.arange(1, labels.numel() + 1) ** 2).sum())

def poisoned(output, labels):
    time.sleep(0.1)
    loss = cross_entropy(output, labels)
    return loss * float("nan") if mark(labels) == {mark} else loss
"""


def mark(labels: Tensor) -> int:
    """What tells a micro-batch from all others."""
    return int((labels.flatten() * torch.arange(1, labels.numel() + 1) ** 2).sum())


def mark_of(config: TrainConfig, step: int) -> int:
    """The mark of the first micro-batch of a 1-based step."""
    data = TokenDataset(config.data.uri, "train", config.data.sequence_length)
    order = SampleOrder(data.num_sequences, config.batch.global_sequences, config.seed)
    ids = order.sample_ids(step - 1)[: config.batch.micro_sequences]
    return mark(read_sequences(data, ids)[1])


def pids_of(actor: str) -> list[int]:
    """The processes of an actor class; Ray names them."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (entry / "cmdline").read_bytes().startswith(f"ray::{actor}".encode()):
                found.append(int(entry.name))
    return found


class Faults:
    """Stops the controller in the second attempt, and then one rank."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._nodes = LocalNodes(cluster.address)
        self._chaos = Chaos(self._nodes)
        self._threads: list[threading.Thread] = []
        self.stopped: Happening | None = None

    def __call__(self, progress: Progress) -> None:
        if progress.attempt == 1 and progress.step >= 8 and not self._threads:
            self._threads.append(threading.Thread(target=self._act))
            self._threads[0].start()

    def _act(self) -> None:
        (controller,) = pids_of("ElasticController")
        os.kill(controller, signal.SIGSTOP)
        time.sleep(POLLER_STOP_S)
        os.kill(controller, signal.SIGCONT)
        time.sleep(2.0)  # it would recover now, if it did
        node = next(n for n in self._nodes.nodes() if self._nodes.busy_workers(n, "TrainWorker"))
        self.stopped = self._chaos.stop_worker(node.name, 120.0, "TrainWorker")

    def finish(self) -> None:
        for thread in self._threads:
            thread.join()
        self._chaos.finish()


def test_a_stopped_rank_a_bad_batch_and_a_slow_poller(
    cluster: LocalCluster,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(
        steps=150,
        on_nan="skip",
        checkpoint={"every": 3},
        validation={"every_steps": 0},
        workers={"min": 1, "max": 2, "max_failures": 0},
        model={"loss": "code_of_faults_test:poisoned"},
    )
    bad = POISON.format(mark=mark_of(config, BAD_STEP))
    (tmp_path / "code_of_faults_test.py").write_text(bad)
    monkeypatch.chdir(tmp_path)
    faults = Faults(cluster)
    try:
        result = train(config, address=cluster.address, on_progress=faults)
    finally:
        faults.finish()
    events = read_events(config.run_uri)
    history = History(events)
    failed = [event for event in events if isinstance(event, Failed)]
    assert [(each.cause, each.counted) for each in failed] == [
        ("not finite", False),
        ("killed", False),
    ]
    assert [event.step for event in events if isinstance(event, Skipped)] == [BAD_STEP]
    assert sorted(history.kept) == [step for step in range(1, 151) if step != BAD_STEP]
    assert history.world_sizes == [2, 2, 2]  # the poller's stop made no recovery
    assert result.step == 150
    assert faults.stopped is not None
    assert failed[1].time_s - faults.stopped.time_s < 5 * 5.5
