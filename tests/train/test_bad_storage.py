"""A run whose object store is busy, breaks connections, is down for a while, or for good."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.platform.account import account
from ebbtide.platform.errors import AccessError, StorageError
from ebbtide.platform.ledger import read_ledger
from ebbtide.platform.local_cluster import LocalCluster
from ebbtide.platform.storage import open_storage
from ebbtide.train import last_save
from ebbtide.train.checkpoint import newest, verify
from ebbtide.train.config import CheckpointConfig, TrainConfig, WorkersConfig
from ebbtide.train.events import CheckpointMissed, read_events
from ebbtide.train.job import train
from ebbtide.train.loop import run_generation
from ebbtide.train.trial import single_process_group
from tests.faulty_s3 import FaultyS3, Rule
from tests.train.conftest import MakeConfig
from tests.train.ranks import Recorder

STEPS = 12


@pytest.fixture
def config(make_config: MakeConfig, faulty_s3: FaultyS3, tmp_path: Path) -> TrainConfig:
    return make_config(
        steps=STEPS,
        storage=f"s3://{faulty_s3.bucket}/{tmp_path.name}",
        checkpoint={"every": 1, "keep_last": 2, "give_up_s": 60},
        validation={"every_steps": 0, "sequences": 2},
    )


class Weather(Recorder):
    """After some steps something happens; how many saves are at work is looked at after each."""

    def __init__(self, happens: dict[int, Callable[[], object]]) -> None:
        super().__init__()
        self.happens = happens
        self.most_savers = 0

    def on_step(self, result: Any) -> None:
        super().on_step(result)
        names = [thread.name for thread in threading.enumerate()]
        self.most_savers = max(self.most_savers, names.count("ebbtide-saver"))
        self.happens.get(result.step, lambda: None)()


def run(config: TrainConfig, happens: dict[int, Callable[[], object]]) -> Weather:
    weather = Weather(happens)
    with single_process_group(torch.device("cpu")):
        run_generation(config, 0, weather, torch.device("cpu"))
    assert [step.step for step in weather.steps] == list(range(1, STEPS + 1))
    assert weather.most_savers <= 1
    return weather


def check_newest(config: TrainConfig, step: int) -> None:
    storage = open_storage(config.run_uri)
    found = newest(storage)
    assert found is not None and found.step == step
    assert verify(storage, found).state == "complete"
    assert storage.uploads() == []


def accounted(weather: Weather) -> set[int]:
    """The steps whose save is known to be stored, to have failed, or to have been left out."""
    return {info.step for info in weather.saved} | {missed.step for missed in weather.missed}


def test_a_busy_store_that_breaks_connections(
    config: TrainConfig, faulty_s3: FaultyS3, retry_gaps_s: list[float]
) -> None:
    config = config.model_copy(
        update={"checkpoint": config.checkpoint.model_copy(update={"every": 3})}
    )
    faulty_s3.set(Rule("status", share=0.3), Rule("reset", share=0.4))  # of the rest: one in seven
    weather = run(config, {})
    assert retry_gaps_s
    faulty_s3.set()
    check_newest(config, STEPS)
    assert accounted(weather) >= {3, 6, 9, 12}


def test_an_outage_costs_saves_and_no_step(
    config: TrainConfig,
    faulty_s3: FaultyS3,
    retry_gaps_s: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(last_save, "_FIRST_PAUSE_S", 0.05)
    down = Rule("reset")

    def wait_for_the_save() -> None:
        """So that one has failed before the next step."""
        while any(thread.name == "ebbtide-saver" for thread in threading.enumerate()):
            time.sleep(0.01)

    weather = run(
        config,
        {
            3: lambda: faulty_s3.set(down),
            5: wait_for_the_save,
            10: wait_for_the_save,
            STEPS: lambda: threading.Timer(1.0, faulty_s3.set).start(),
        },
    )
    check_newest(config, STEPS)
    assert down.hits
    assert {missed.why for missed in weather.missed} >= {"failed"}
    assert accounted(weather) == set(range(1, STEPS + 1))


def test_the_last_save_is_not_lost_silently(
    config: TrainConfig,
    faulty_s3: FaultyS3,
    retry_gaps_s: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(last_save, "_FIRST_PAUSE_S", 0.05)
    brief = config.checkpoint.model_copy(update={"give_up_s": 1.0})
    config = config.model_copy(update={"checkpoint": brief})
    with pytest.raises(StorageError, match="cannot write .*: "):
        run(config, {6: lambda: faulty_s3.set(Rule("reset", "^PUT "))})
    faulty_s3.set()
    found = newest(open_storage(config.run_uri))
    assert found is None or found.step <= 6
    resumed = run_on(config)
    assert resumed.steps[-1].step == STEPS
    check_newest(config, STEPS)


def run_on(config: TrainConfig) -> Weather:
    weather = Weather({})
    with single_process_group(torch.device("cpu")):
        run_generation(config, 1, weather, torch.device("cpu"))
    return weather


def test_what_does_not_pass_by_itself_is_said_at_once(
    config: TrainConfig, faulty_s3: FaultyS3
) -> None:
    denied = Rule("status", "^PUT .*checkpoints", status=403, code="AccessDenied")
    start_s = time.monotonic()
    with pytest.raises(AccessError, match="permission denied; allow s3:GetObject"):
        run(config, {6: lambda: faulty_s3.set(denied)})
    assert time.monotonic() - start_s < config.checkpoint.give_up_s


@pytest.mark.ray
@pytest.mark.slow
def test_a_job_whose_last_save_fails_says_so(
    config: TrainConfig, faulty_s3: FaultyS3, cluster: LocalCluster
) -> None:
    config = config.model_copy(
        update={
            "steps": 6,
            "checkpoint": CheckpointConfig(every=3, give_up_s=0, memory=False),
            "workers": WorkersConfig(max_failures=0),
        }
    )
    refused = r"^PUT .*step-0*6-.*manifest"
    faulty_s3.set(Rule("status", refused, status=400, code="InvalidArgument"))
    with pytest.raises(StorageError, match="manifest.json: the server answered InvalidArgument"):
        train(config, address=cluster.address)
    assert StorageError.exit_code == 4
    storage = open_storage(config.run_uri)
    found = newest(storage)
    assert found is not None and found.step == 3
    missed = [e for e in read_events(storage) if isinstance(e, CheckpointMissed)]
    assert [(event.step, event.why) for event in missed] == [(6, "failed")]
    assert account(read_ledger(storage).records, time.time()).saves_missed == {"failed": 1}
