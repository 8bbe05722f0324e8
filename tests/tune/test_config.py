"""What a sweep's file may say, and how it is told what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.platform.config import parse
from ebbtide.platform.errors import ConfigError
from ebbtide.tune.config import Domain, TuneConfig, train_keys

MINIMAL = """\
base: train.yaml
num_samples: 4
space:
  optimizer.lr: {loguniform: [1e-4, 1e-2]}
"""


def read(text: str, *overrides: str) -> TuneConfig:
    return parse(text, TuneConfig, "tune.yaml", overrides)


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        read(text, *overrides)
    return str(error.value)


def test_defaults() -> None:
    config = read(MINIMAL)
    assert config.metric == "validation_loss" and config.mode == "min"
    assert config.space["optimizer.lr"].values == (1e-4, 1e-2)
    assert config.num_trials == 4


def test_every_train_key_is_known_by_its_dotted_name() -> None:
    keys = set(train_keys())
    assert {"steps", "optimizer.lr", "batch.global_sequences", "precision"} <= keys
    assert "optimizer" not in keys


def test_an_unknown_key_of_the_space_names_its_line_and_the_nearest_key() -> None:
    text = MINIMAL + "  optimizer.weight_deacy: {choice: [0, 0.1]}\n"
    assert "tune.yaml:5: space.optimizer.weight_deacy" in refusal(text)
    assert "did you mean optimizer.weight_decay?" in refusal(text)


def test_sections_may_be_nested_and_set_from_the_command_line() -> None:
    nested = MINIMAL.replace("optimizer.lr: ", "optimizer:\n    lr: ")
    assert read(nested).space == read(MINIMAL).space
    config = read(MINIMAL, "space.optimizer.lr={choice: [0.1, 0.2, 0.3]}")
    assert config.space["optimizer.lr"].kind == "choice"


@pytest.mark.parametrize(
    ("domain", "told"),
    [
        ("3e-4", "write one range"),
        ("{logunifrom: [1e-4, 1e-2]}", "did you mean loguniform?"),
        ("{loguniform: [0, 1]}", "above 0"),
        ("{uniform: [1, 1]}", "below the second"),
        ("{uniform: [1, .inf]}", "finite numbers"),
        ("{int: [1, 2.5]}", "whole numbers"),
        ("{int: [true, 3]}", "whole numbers"),
        ("{quniform: [0, 1]}", "takes 3"),
        ("{quniform: [0, 1, 0]}", "step must be above 0"),
        ("{choice: []}", "a list of values"),
        ("{uniform: [0, 1], choice: [1]}", "write one range"),
    ],
)
def test_an_impossible_range_is_refused(domain: str, told: str) -> None:
    text = MINIMAL.replace("{loguniform: [1e-4, 1e-2]}", domain)
    assert told in refusal(text)
    assert "tune.yaml:4: space.optimizer.lr" in refusal(text)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["searcher=grid"], "grid needs a choice for space.optimizer.lr"),
        (["num_samples=null"], "needs num_samples"),
        (["num_samples=0"], "greater than or equal to 1"),
        (["concurrency=3"], "concurrency is 3, but pool.size is 2"),
        (["overrides={optimizer.lr: 1e-3}"], "optimizer.lr is both searched and set"),
        (["steps=5", "space.steps={int: [1, 9]}"], "steps is both searched and set"),
        (["steps=5", "overrides={steps: 6}"], "steps is set twice"),
        (["space.name={choice: [a]}"], "is set by the sweep"),
        (["mode=lowest"], "'min' or 'max'"),
        (["trial_timeout_s=0"], "greater than 0"),
        (["scheduler=ahsa"], "'hyperband', 'median' or 'pbt'"),
        (["scheduler=pbt", "searcher=optuna"], "it needs searcher: random"),
        (["scheduler=pbt", "space.seed={int: [1, 9]}"], "pbt cannot search seed"),
        (["scheduler=pbt", "space.reduction={choice: [exact], when: {optimizer.lr: 1}}"], "when"),
        (["base=null"], "set base, a training job's file, or function"),
        (["function=a:b"], "set base, a training job's file, or function"),
        (["base=null", "function=a:b"], "function: set storage"),
        (["space.seed={int: [1, 9], when: {steps: 3}}"], "steps, which is not searched before"),
        (["max_dollars=0"], "greater than 0"),
        (["max_dollars=10000000000000000"], "less than or equal to"),
        (["max_dollars='5'"], "a number of dollars"),
        (["max_dollars=.inf"], "finite"),
    ],
)
def test_what_does_not_fit_together_is_refused(overrides: list[str], told: str) -> None:
    assert told in refusal(MINIMAL, *overrides)


def test_grid_counts_its_combinations() -> None:
    text = """\
base: train.yaml
searcher: grid
space: {optimizer.lr: {choice: [1, 2, 3]}, seed: {choice: [0, 1]}}
"""
    assert read(text).num_trials == 6


def test_a_dumped_sweep_reads_back() -> None:
    import yaml

    config = read(MINIMAL)
    assert read(yaml.safe_dump(config.model_dump(mode="json"))) == config


FUNCTION = """\
function: my.module:function
storage: runs
space:
  optimizer: {choice: [adam, sgd]}
  momentum: {choice: [0.8, 0.9], when: {optimizer: sgd}}
  nesterov: {choice: [true, false], when: {momentum: [0.9]}}
searcher: grid
"""


def test_a_functions_keys_are_its_own_and_conditions_thin_a_grid_out() -> None:
    config = read(FUNCTION)
    assert config.combinations() == [
        {"optimizer": "adam"},
        {"optimizer": "sgd", "momentum": 0.8},
        {"optimizer": "sgd", "momentum": 0.9, "nesterov": True},
        {"optimizer": "sgd", "momentum": 0.9, "nesterov": False},
    ]
    assert config.num_trials == 4 and config.is_conditional
    everything = {"optimizer": "adam", "momentum": 0.9, "nesterov": True}
    assert config.active(everything) == {"optimizer": "adam"}
    written = config.model_dump(mode="json")["space"]["momentum"]
    assert written == {"choice": [0.8, 0.9], "when": {"optimizer": ["sgd"]}}


def test_a_scheduler_of_a_function_needs_to_know_the_steps() -> None:
    assert "needs steps" in refusal(FUNCTION, "scheduler=asha")
    assert read(FUNCTION, "scheduler=asha", "steps=9").steps == 9


@pytest.mark.parametrize(
    ("written", "value", "nearest"),
    [
        ({"uniform": [0, 1]}, 1.2, 1),
        ({"loguniform": [0.1, 1]}, 0.05, 0.1),
        ({"int": [1, 9]}, 3.6, 4),
        ({"logint": [1, 9]}, 12.0, 9),
        ({"quniform": [0, 1, 0.25]}, 0.6, 0.5),
        ({"choice": ["a", "b"]}, "b", "b"),
    ],
)
def test_the_nearest_value_of_a_range(written: Any, value: Any, nearest: Any) -> None:
    assert Domain.model_validate(written).nearest(value) == nearest
