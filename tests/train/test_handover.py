"""A training that goes on from another's state, against one that was left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ebbtide.platform.errors import CheckpointError
from ebbtide.train.handover import Handover
from ebbtide.train.trial import Report, run_trial
from tests.train.conftest import MakeConfig


def test_what_goes_on_from_a_state_is_what_would_have_gone_on(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(steps=4, validation={"every_steps": 1})
    whole: list[Report] = []
    first = Handover()

    def report(found: Report) -> None:
        whole.append(found)
        if found["step"] == 2:
            first.save(str(tmp_path / "state"))

    with pytest.raises(CheckpointError, match="before the first step"):
        first.save(str(tmp_path / "state"))
    run_trial(config, report, handover=first)
    rest: list[Report] = []
    run_trial(config, rest.append, handover=Handover(str(tmp_path / "state")))
    assert rest == whole[2:]

    found = torch.load(tmp_path / "state")
    del found["state"][min(found["state"])]
    torch.save(found, tmp_path / "other")
    with pytest.raises(CheckpointError, match="of another model or optimizer"):
        run_trial(config, rest.append, handover=Handover(str(tmp_path / "other")))
