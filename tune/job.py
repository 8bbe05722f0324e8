"""A sweep from its file to its best ``train.yaml``.

Ray Tune proposes, schedules and stops; the pool's evaluators run the trials; the results go to the
sweep's own storage. Promises: nothing is started for a sweep that cannot work; a trial that fails
is listed with its reason and is never the best; an interrupt frees the evaluators at once; after a
kill at any moment the same call continues, and no trial that had finished runs again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace

from ebbtide.platform.errors import AlreadyExists, NotFound, TuneError
from ebbtide.platform.storage import Storage, join, open_storage, probe
from ebbtide.train.run_lock import RunLock
from ebbtide.tune import output
from ebbtide.tune.driver import Driver, limits, spec
from ebbtide.tune.results import SweepResult, Trial
from ebbtide.tune.space import Sweep

_log = logging.getLogger(__name__)
_SPEC = "sweep.json"
_BEST = "best.yaml"
_REASONS_SHOWN = 3


def run_sweep(
    sweep: Sweep,
    *,
    address: str | None = None,
    out: str | None = None,
    on_trial: Callable[[Trial], None] | None = None,
    function: str | None = None,
) -> SweepResult:
    """Run a sweep and write its results; the best job goes to ``out`` (default: beside them).

    One that an earlier driver began is continued; a finished one is returned as it is.
    ``on_trial`` is called when a trial has ended. ``function`` is what a trial runs instead of the
    training, a :data:`ebbtide.tune.trial.TrialFunction`. Raises TuneError if no trial succeeds,
    ClusterError if no evaluator can be had in time or another driver runs the sweep, AlreadyExists
    if something else would be written over, CostError if max_dollars meets an unknown price,
    NotFound or DataError if the job's dataset cannot be used.
    """
    storage = open_storage(sweep.uri)
    probe(storage)
    _check_free(storage, sweep, out)
    found = _finished(storage, sweep)
    if found is not None:
        why = "has finished" if found.limit is None else f"has ended: {found.limit}"
        _log.info("the sweep %s %s; its results are in %s", sweep.name, why, sweep.uri)
        return _conclude(storage, sweep, found, out)
    if function is None and sweep.trial_base is not None and "data.uri" not in sweep.config.space:
        from ebbtide.train.dataset import read_index

        read_index(sweep.trial_base.data.uri)
    with RunLock(storage):
        storage.put(_SPEC, json.dumps(spec(sweep), indent=1).encode())
        result = Driver(sweep, storage, function, on_trial).run(address)
    return _conclude(storage, sweep, result, out)


def _finished(storage: Storage, sweep: Sweep) -> SweepResult | None:
    """The results of a sweep that has nothing left to do, or nothing left to do it with."""
    try:
        found = json.loads(storage.get(output.RESULTS))
    except NotFound:
        return None
    result = SweepResult.from_document(found)
    spent = limits(sweep).reached(result.seconds, result.usd) is not None
    over = result.status == "finished" or (result.status == "budget" and spent)
    return result if over else None


def _split(uri: str) -> tuple[Storage, str]:
    folder, slash, name = uri.rpartition("/")
    return open_storage(folder if slash else "."), name


def _check_free(storage: Storage, sweep: Sweep, out: str | None) -> None:
    """Refuse to write over a different sweep's results, or over any file as the best job."""
    try:
        found = json.loads(storage.get(_SPEC))
    except NotFound:
        found = None
    if found is not None and found != json.loads(json.dumps(spec(sweep))):
        raise AlreadyExists(
            f"{sweep.uri}: holds the results of a different sweep; set another name or storage"
        )
    if out is not None:
        folder, name = _split(out)
        if any(info.key == name for info in folder.list(name)):
            raise AlreadyExists(f"{out}: exists already; choose another --out or remove it")


def _conclude(storage: Storage, sweep: Sweep, result: SweepResult, out: str | None) -> SweepResult:
    """Write the results and the best job. Raises TuneError if there is none."""
    found = result.best
    if found is None:
        if result.trials:
            output.write(storage, result)
        reasons = list(dict.fromkeys(trial.reason or "no result" for trial in result.failed))
        raise TuneError(
            f"no trial of {sweep.name} succeeded ({len(result.failed)} failed: "
            f"{'; '.join(reasons[:_REASONS_SHOWN])}); details: {join(sweep.uri, output.RESULTS)}"
        )
    header = (
        f"# Trial {found.number}, the best of {len(result.trials)} of the sweep {sweep.name}: "
        f"{sweep.config.metric} {found.metric:.6g}\n"
    )
    text = header + sweep.best(found.values)
    target = out or join(sweep.uri, _BEST)
    folder, name = _split(target)
    folder.put(name, text.encode(), if_absent=out is not None)
    result = replace(result, best_file=target)
    output.write(storage, result)
    return result
