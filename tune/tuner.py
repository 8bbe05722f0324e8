"""A sweep in Ray Tune's own terms: space, searcher, scheduler, callback. Public interfaces only."""

from __future__ import annotations

from typing import Any, Protocol

from ray import tune
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator

from ebbtide.tune.config import Domain, TuneConfig
from ebbtide.tune.evaluator import BOOKKEEPING


class Audience(Protocol):
    """Who hears of results; see :class:`ebbtide.tune.recorder.Recorder`."""

    def reported(self, trial_id: str, metrics: dict[str, float], finished: bool) -> None: ...
    def completed(self, trial_id: str) -> None: ...


class PooledTrial(tune.Trainable):  # type: ignore[misc]  # Ray is untyped
    """What Ray Tune believes it runs. Never started: the pool's evaluators stand in its place."""

    def setup(self, config: dict[str, Any]) -> None:
        raise AssertionError("a trial was started outside the pool")


class _Listener(tune.Callback):  # type: ignore[misc]  # Ray is untyped
    def __init__(self, audience: Audience) -> None:
        self._audience = audience

    def on_trial_result(
        self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **_: Any
    ) -> None:
        own = BOOKKEEPING | {"trial_id"}
        metrics = {key: value for key, value in result.items() if key not in own}
        self._audience.reported(trial.trial_id, metrics, result["finished"])

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
        self._audience.completed(trial.trial_id)


def domain(found: Domain, grid: bool) -> Any:
    """Ray Tune's form of one key's values."""
    values = list(found.values)
    match found.kind:
        case "choice":
            return tune.grid_search(values) if grid else tune.choice(values)
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


def _searcher(config: TuneConfig) -> Any:
    """What proposes the next values; the same proposals for the same seed and results."""
    if config.searcher == "optuna":
        import optuna
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return OptunaSearch(seed=config.seed)
    return BasicVariantGenerator(random_state=config.seed)


def _scheduler(config: TuneConfig, max_steps: int) -> Any:
    """What stops trials early, by the ``step`` that they report."""
    if config.scheduler == "none":
        return FIFOScheduler()
    grace_steps = config.asha.grace_steps or max(1, max_steps // 9)
    return ASHAScheduler(
        time_attr="step",
        max_t=max_steps,
        grace_period=min(grace_steps, max_steps),
        reduction_factor=config.asha.reduction_factor,
    )


def plain(value: Any) -> Any:
    """A sampled value without numpy's types, so that it can be written as YAML and JSON."""
    return value.item() if hasattr(value, "item") else value


def make_tuner(
    config: TuneConfig, *, name: str, max_steps: int, scratch: str, audience: Audience
) -> tune.Tuner:
    """The tuner of a sweep. Its own files go to the folder ``scratch`` and may be deleted after."""
    grid = config.searcher == "grid"
    concurrency = config.concurrency or config.pool.size
    return tune.Tuner(
        PooledTrial,
        # Dotted keys, so that Ray Tune sees a flat space.
        param_space={key: domain(found, grid) for key, found in config.space.items()},
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
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            failure_config=tune.FailureConfig(max_failures=config.max_tries - 1),
            callbacks=[_Listener(audience)],
        ),
    )
