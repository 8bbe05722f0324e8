"""Two runs compared by their events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from ebbtide.__main__ import app
from ebbtide.platform.errors import CheckpointError
from ebbtide.platform.storage import open_storage
from ebbtide.train.diff import Comparison, Difference, compare
from ebbtide.train.events import Event, EventLog, GenerationBegan, StateDigest, Step


def step(number: int, attempt: int = 0, loss: float = 2.0, samples: str = "ab") -> Step:
    return Step(
        time_s=float(number),
        attempt=attempt,
        step=number,
        loss=loss,
        grad_norm=1.0,
        lr=0.1,
        tokens=8,
        epoch=0,
        samples=samples,
        seconds={"compute": 0.1 * number + attempt},
    )


def state(number: int, attempt: int = 0, tensors: dict[str, str] | None = None) -> StateDigest:
    return StateDigest(
        time_s=0.0, attempt=attempt, step=number, tensors={"model.w": "0", **(tensors or {})}
    )


def began(attempt: int) -> GenerationBegan:
    return GenerationBegan(time_s=0.0, attempt=attempt, world_size=1, nodes=("n",))


ONE: list[Event] = [began(0), step(1), state(1), step(2), state(2), step(3)]


def test_the_same_run() -> None:
    same = Comparison(steps=3, digests=2, only_one=0, only_other=0, difference=None)
    assert compare(ONE, ONE) == same
    # step 2 was made twice: lost first, with other bits, and then kept
    again: list[Event] = [
        began(0), step(1), state(1), step(2, loss=9.0), state(2, tensors={"model.w": "f"}),
        began(1), step(2, 1), state(2, 1), step(3, 1), step(4, 1),
    ]  # fmt: skip
    assert compare(ONE, again) == replace(same, only_other=1)


def test_the_first_difference_is_named() -> None:
    def difference(other: list[Event]) -> Difference | None:
        return compare(ONE, other).difference

    tensor: list[Event] = [*ONE[:2], state(1, tensors={"optimizer.w.exp_avg": "1"}), *ONE[3:]]
    assert difference(tensor) == Difference(1, "optimizer.w.exp_avg", "absent", "1")
    last_bit = 2.0000000000000004
    assert difference([*ONE[:5], step(3, loss=last_bit)]) == Difference(
        3, "loss", "2.0", "2.0000000000000004"
    )
    samples: list[Event] = [ONE[0], step(1, samples="cd"), *ONE[2:5], step(3, loss=5.0)]
    assert difference(samples) == Difference(1, "samples", "'ab'", "'cd'")


@pytest.fixture
def runs(tmp_path: object) -> tuple[str, str]:
    uris = []
    for name, events in (("a", ONE), ("b", [*ONE[:5], step(3, loss=2.5), step(4)])):
        uri = f"{tmp_path}/{name}"
        with EventLog(open_storage(uri), session=0) as log:
            log.write(events)
        uris.append(uri)
    return uris[0], uris[1]


def test_the_command(runs: tuple[str, str]) -> None:
    one, other = runs
    same = CliRunner().invoke(app, ["diff", one, one])
    assert same.exit_code == 0
    assert same.output == "same run: 3 steps, bit by bit (the state at 2)\n"
    different = CliRunner().invoke(app, ["diff", one, other])
    assert different.exit_code == 1
    assert "different at step 3: loss is 2.0 in" in different.output
    assert '"same": false' in CliRunner().invoke(app, ["diff", one, other, "--json"]).output
    nothing = CliRunner().invoke(app, ["diff", one, f"{one}/nothing"])
    assert isinstance(nothing.exception, CheckpointError)
    assert f"{one}/nothing: no run" in str(nothing.exception)
