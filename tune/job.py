"""A sweep from its file to its best ``train.yaml``.

Ray Tune proposes, schedules and stops; the pool's evaluators run the trials; the results go to the
sweep's own storage. Promises: nothing is started for a sweep that cannot work; a trial that fails
is listed with its reason and is never the best; an interrupt frees the evaluators at once.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from ebbtide.platform import config as job_file
from ebbtide.platform.clock import SystemClock
from ebbtide.platform.errors import AlreadyExists, NotFound, TuneError
from ebbtide.platform.storage import Storage, join, open_storage, probe
from ebbtide.train.dataset import read_index
from ebbtide.train.ray_connection import connected
from ebbtide.tune.recorder import Recorder
from ebbtide.tune.results import SweepResult, Trial
from ebbtide.tune.space import Sweep, with_values
from ebbtide.tune.trial import TrialRequest

_RESULTS = "results.json"
_BEST = "best.yaml"
_TRAIN = "ebbtide.tune.trial:train"
_REASONS_SHOWN = 3


def run_sweep(
    sweep: Sweep,
    *,
    address: str | None = None,
    out: str | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    function: str = _TRAIN,
) -> SweepResult:
    """Run a sweep and write its results; the best job goes to ``out`` (default: beside them).

    ``on_trial`` is called when a trial has ended. ``function`` is what a trial runs, a
    :data:`ebbtide.tune.trial.TrialFunction`. Raises TuneError if no trial succeeds, ClusterError
    if no evaluator can be had in time, AlreadyExists if something else would be written over,
    NotFound or DataError if the job's dataset cannot be used.
    """
    clock = SystemClock()
    called_at_s = clock.time()
    storage = open_storage(sweep.uri)
    probe(storage)
    _check_free(storage, sweep, out)
    if function == _TRAIN and "data.uri" not in sweep.config.space:
        read_index(sweep.trial_base.data.uri)
    recorder = Recorder(sweep.config, sweep.trial_base.steps, clock, on_trial)
    status: Literal["finished", "interrupted"] = "interrupted"
    try:
        _fit(sweep, address, function, recorder)
        status = "finished"
    finally:
        starts_s = [trial.started_at_s - called_at_s for trial in recorder.trials]
        result = SweepResult(
            name=sweep.name,
            uri=sweep.uri,
            metric=sweep.config.metric,
            mode=sweep.config.mode,
            status=status,
            trials=recorder.trials,
            seconds=clock.time() - called_at_s,
            first_trial_s=min(starts_s, default=None),
        )
        if result.trials:
            _write(storage, sweep, result)
    return _conclude(storage, sweep, result, out)


def _fit(sweep: Sweep, address: str | None, function: str, recorder: Recorder) -> None:
    """Connect, take the evaluators, and let Ray Tune run to its end."""
    from ebbtide.tune.pool import Pool

    config = sweep.config
    seats = config.pool.model_copy(update={"size": config.concurrency or config.pool.size})
    with connected(address), Pool(seats) as pool, tempfile.TemporaryDirectory() as scratch:
        # Importing Ray Tune takes about as long as joining the pool, so both go on at once.
        import ray.tune

        from ebbtide.platform.ray_seam.tune import PooledSweep, pooled
        from ebbtide.tune import tuner
        from ebbtide.tune.failures import failure_of, is_lost

        base = sweep.trial_base.model_dump(mode="json")
        environment = {name: text for name, text in os.environ.items() if name.startswith("AWS_")}

        def request_of(trial_id: str, values: dict[str, Any]) -> TrialRequest:
            request = TrialRequest(
                trial_id=trial_id,
                function=function,
                base=base,
                values={key: tuner.plain(value) for key, value in values.items()},
                metric=config.metric,
                timeout_s=config.trial_timeout_s,
                cwd=os.getcwd(),
                environment=environment,
            )
            recorder.started(trial_id, request.values)
            return request

        def may_retry(trial_id: str, error: BaseException) -> bool:
            failure = failure_of(error)
            recorder.failed(trial_id, failure)
            return failure.may_retry

        with pooled(PooledSweep(pool, pool.lease.sweep_id, request_of, may_retry, is_lost)):
            made = tuner.make_tuner(
                config,
                name=sweep.name,
                max_steps=sweep.trial_base.steps,
                scratch=scratch,
                audience=recorder,
            )
            pool.wait()
            try:
                made.fit()
            except ray.tune.TuneError as error:
                raise TuneError(f"Ray Tune failed: {error}") from error


def _spec(sweep: Sweep) -> dict[str, Any]:
    """What makes two sweeps the same: all but where they run."""
    config = sweep.config.model_dump(mode="json", exclude={"pool", "concurrency"})
    return {"sweep": config, "base": sweep.base.model_dump(mode="json")}


def _split(uri: str) -> tuple[Storage, str]:
    folder, slash, name = uri.rpartition("/")
    return open_storage(folder if slash else "."), name


def _check_free(storage: Storage, sweep: Sweep, out: str | None) -> None:
    """Refuse to write over a different sweep's results, or over any file as the best job."""
    try:
        found = json.loads(storage.get(_RESULTS))
    except NotFound:
        found = None
    if found is not None and found.get("spec") != _spec(sweep):
        raise AlreadyExists(
            f"{sweep.uri}: holds the results of a different sweep; set another name or storage"
        )
    if out is not None:
        folder, name = _split(out)
        if any(info.key == name for info in folder.list(name)):
            raise AlreadyExists(f"{out}: exists already; choose another --out or remove it")


def _write(storage: Storage, sweep: Sweep, result: SweepResult) -> None:
    document = {**result.document(), "spec": _spec(sweep)}
    storage.put(_RESULTS, json.dumps(document, indent=1).encode())


def _conclude(storage: Storage, sweep: Sweep, result: SweepResult, out: str | None) -> SweepResult:
    """Write the best job. Raises TuneError if there is none."""
    found = result.best
    if found is None:
        reasons = list(dict.fromkeys(trial.reason or "no result" for trial in result.failed))
        raise TuneError(
            f"no trial of {sweep.name} succeeded ({len(result.failed)} failed: "
            f"{'; '.join(reasons[:_REASONS_SHOWN])}); details: {join(sweep.uri, _RESULTS)}"
        )
    header = (
        f"# Trial {found.number}, the best of {len(result.trials)} of the sweep {sweep.name}: "
        f"{sweep.config.metric} {found.metric:.6g}\n"
    )
    text = header + job_file.dump(with_values(sweep.base, found.values))
    target = out or join(sweep.uri, _BEST)
    folder, name = _split(target)
    folder.put(name, text.encode(), if_absent=out is not None)
    result = replace(result, best_file=target)
    _write(storage, sweep, result)
    return result
