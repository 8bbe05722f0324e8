"""A sweep in Ray Tune's own terms: space, searcher, scheduler, callback. Public interfaces only."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from ray import tune
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
)
from ray.tune.search.basic_variant import BasicVariantGenerator

from ebbtide.tune.config import Domain, TuneConfig
from ebbtide.tune.running import BOOKKEEPING

_COMBINATION = "combination"


class Audience(Protocol):
    """Who hears of results; see :class:`ebbtide.tune.recorder.Recorder`."""

    def reported(
        self, trial_id: str, metrics: dict[str, float], finished: bool, seconds: float
    ) -> None: ...
    def completed(self, trial_id: str) -> None: ...


class PooledTrial(tune.Trainable):  # type: ignore[misc]  # Ray is untyped
    """What Ray Tune believes it runs. Never started: the pool's evaluators stand in its place."""

    def setup(self, config: dict[str, Any]) -> None:
        raise AssertionError("a trial was started outside the pool")


class _Listener(tune.Callback):  # type: ignore[misc]  # Ray is untyped
    def __init__(self, audience: Audience) -> None:
        self._audience = audience

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray pickles it with every snapshot, which nobody reads

    def on_trial_result(
        self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **_: Any
    ) -> None:
        own = BOOKKEEPING | {"trial_id"}
        metrics = {key: value for key, value in result.items() if key not in own}
        finished, seconds = result["finished"], result["time_total_s"]
        self._audience.reported(trial.trial_id, metrics, finished, seconds)

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
        self._audience.completed(trial.trial_id)


class _Limit(tune.Stopper):  # type: ignore[misc]  # Ray is untyped
    """Ends the sweep when ``is_spent`` says so; it is asked after every event."""

    def __init__(self, is_spent: Callable[[], bool]) -> None:
        self._is_spent = is_spent

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._is_spent()


def domain(found: Domain) -> Any:
    """Ray Tune's form of one key's values."""
    values = list(found.values)
    match found.kind:
        case "choice":
            return tune.choice(values)
        case "uniform":
            return tune.uniform(*values)
        case "quniform":
            return tune.quniform(*values)
        case "loguniform":
            return tune.loguniform(*values)
        case "int":
            return tune.randint(values[0], values[1] + 1)
        case "logint":
            return tune.lograndint(values[0], values[1] + 1)


def suggest(found: Domain, key: str, trial: Any) -> Any:
    """The same of an Optuna trial."""
    values = list(found.values)
    match found.kind:
        case "choice":
            return trial.suggest_categorical(key, values)
        case "uniform":
            return trial.suggest_float(key, *values)
        case "quniform":
            return trial.suggest_float(key, values[0], values[1], step=values[2])
        case "loguniform":
            return trial.suggest_float(key, *values, log=True)
        case "int":
            return trial.suggest_int(key, *values)
        case "logint":
            return trial.suggest_int(key, *values, log=True)


def _param_space(config: TuneConfig) -> dict[str, Any]:
    """Dotted keys, so that Ray Tune sees a flat space; of a grid only what differs."""
    if config.searcher == "grid":
        return {_COMBINATION: tune.grid_search(config.combinations())}
    if config.searcher == "optuna" and config.is_conditional:
        return {}  # the searcher has it
    return {key: domain(found) for key, found in config.space.items()}


def values_of(config: TuneConfig, sampled: Mapping[str, Any]) -> dict[str, Any]:
    """A trial's values of what the searcher sampled, without numpy's types."""
    found = sampled[_COMBINATION] if config.searcher == "grid" else sampled
    return config.active({key: _plain(value) for key, value in found.items()})


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


@dataclass(frozen=True)
class _Proposals:
    """A conditional space, defined by running it. (Ray pickles it, so it is no closure.)"""

    space: Mapping[str, Domain]

    def __call__(self, trial: Any) -> None:
        found: dict[str, Any] = {}
        for key, wanted in self.space.items():
            if wanted.is_active(found):
                suggest(wanted, key, trial)
                found[key] = trial.params[key]


def _searcher(config: TuneConfig) -> Any:
    """What proposes the next values; the same proposals for the same seed and results."""
    if config.searcher != "optuna":
        return BasicVariantGenerator(random_state=config.seed)
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if not config.is_conditional:
        return OptunaSearch(seed=config.seed)

    return OptunaSearch(
        _Proposals(config.space), metric=config.metric, mode=config.mode, seed=config.seed
    )


class _Pbt(PopulationBasedTraining):  # type: ignore[misc]  # Ray is untyped
    """Draws from a generator of its own: Ray's is the whole process's, which others use, too."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(**options)
        self._own = (random.Random(seed).getstate(), np.random.RandomState(seed).get_state())

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> Any:
        theirs = random.getstate(), np.random.get_state()
        random.setstate(self._own[0])
        np.random.set_state(self._own[1])
        try:
            return super().on_trial_result(tune_controller, trial, result)
        finally:
            self._own = (random.getstate(), np.random.get_state())
            random.setstate(theirs[0])
            np.random.set_state(theirs[1])


@dataclass(frozen=True)
class _WithinSpace:
    """Ray multiplies values without regard to their range. (Ray pickles it: it is no closure.)"""

    space: Mapping[str, Domain]

    def __call__(self, values: dict[str, Any]) -> dict[str, Any]:
        for key, found in self.space.items():
            values[key] = found.nearest(values[key])
        return values


def _population(config: TuneConfig, max_steps: int) -> Any:
    mutations = {
        key: list(found.values) if found.kind == "choice" else domain(found)
        for key, found in config.space.items()
    }
    return _Pbt(
        config.seed,
        time_attr="step",
        perturbation_interval=config.pbt.interval_steps or max(1, max_steps // 10),
        hyperparam_mutations=mutations,
        quantile_fraction=config.pbt.quantile,
        resample_probability=config.pbt.resample,
        custom_explore_fn=_WithinSpace(config.space),
        log_config=False,
    )


def _scheduler(config: TuneConfig, max_steps: int | None) -> Any:
    """What stops trials early, by the ``step`` that they report."""
    if config.scheduler == "none" or max_steps is None:
        return FIFOScheduler()
    ninth = max(1, max_steps // 9)
    match config.scheduler:
        case "asha":
            return ASHAScheduler(
                time_attr="step",
                max_t=max_steps,
                grace_period=min(config.asha.grace_steps or ninth, max_steps),
                reduction_factor=config.asha.reduction_factor,
            )
        case "hyperband":
            return HyperBandScheduler(
                time_attr="step",
                max_t=max_steps,
                reduction_factor=config.hyperband.reduction_factor,
            )
        case "pbt":
            return _population(config, max_steps)
        case "median":
            return MedianStoppingRule(
                time_attr="step",
                grace_period=config.median.grace_steps or ninth,
                min_samples_required=config.median.min_trials,
            )


def make_tuner(
    config: TuneConfig,
    *,
    name: str,
    max_steps: int | None,
    scratch: str,
    audience: Audience,
    is_spent: Callable[[], bool] = lambda: False,
) -> tune.Tuner:
    """The tuner of a sweep, which ends early when ``is_spent``.

    Its own files go to the folder ``scratch`` and may be deleted after.
    """
    concurrency = config.concurrency or config.pool.size
    return tune.Tuner(
        PooledTrial,
        param_space=_param_space(config),
        tune_config=tune.TuneConfig(
            metric=config.metric,
            mode=config.mode,
            num_samples=config.num_samples or 1,
            search_alg=_searcher(config),
            scheduler=_scheduler(config, max_steps),
            # A searcher that learns must not propose more than can run.
            max_concurrent_trials=concurrency if config.searcher == "optuna" else None,
            trial_dirname_creator=lambda trial: str(trial.trial_id),
        ),
        run_config=tune.RunConfig(
            name=name,
            storage_path=scratch,
            verbose=0,
            stop=_Limit(is_spent),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            failure_config=tune.FailureConfig(max_failures=config.max_tries - 1),
            callbacks=[_Listener(audience)],
        ),
    )
