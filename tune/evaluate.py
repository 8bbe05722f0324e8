"""Scoring checkpoints and exports by the tasks of a suite, each in a trial of the pool.

Promises: by validation loss a checkpoint's score is what its run logged at that step, or would
have; what cannot be scored fails alone, with the reason, and if nothing can, nothing is started.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

from ebbtide.platform import export_manifest
from ebbtide.platform.errors import ConfigError, EbbtideError, NotFound, TuneError
from ebbtide.platform.storage import open_storage
from ebbtide.train import manifest
from ebbtide.train.config import TrainConfig
from ebbtide.tune.config import Domain, PoolConfig, TuneConfig
from ebbtide.tune.scoring import CHECKPOINT, NO_BASE, TASK
from ebbtide.tune.space import Sweep
from ebbtide.tune.suite import SCORE, Scores, Suite, Task, ranked

VALIDATION = Suite(tasks={"validation_loss": Task()})


def evaluate(
    uris: Sequence[str],
    suite: Suite = VALIDATION,
    base: TrainConfig | None = None,
    *,
    pool: PoolConfig | None = None,
    address: str | None = None,
) -> list[Scores]:
    """Score every one of ``uris`` by every task; a run's URI means its newest checkpoint.

    What a task does not say is taken from ``base``, without it from the checkpoint's own run. Best
    first by the first task. Raises ConfigError if one is given twice, TuneError if nothing can be
    scored.
    """
    from ebbtide.tune.job import run_sweep

    _require_different(uris)
    faults = {uri: found for uri in uris if (found := fault(uri, base)) is not None}
    if len(faults) == len(uris):
        raise TuneError(f"nothing can be scored: {'; '.join(faults.values())}")
    with tempfile.TemporaryDirectory(prefix="ebbtide-evaluate-") as folder:
        config = TuneConfig(
            function="ebbtide.tune.scoring:score",
            storage=folder,
            overrides={
                "base": None if base is None else base.model_dump(mode="json"),
                "tasks": suite.model_dump(mode="json")["tasks"],
            },
            space={
                CHECKPOINT: Domain.model_validate(
                    {"choice": [uri for uri in uris if uri not in faults]}
                ),
                TASK: Domain.model_validate({"choice": list(suite.tasks)}),
            },
            searcher="grid",
            metric=SCORE,
            pool=pool or PoolConfig(),
        )
        try:
            result = run_sweep(Sweep(config), address=address)
        except TuneError as error:  # its details go with the folder
            raise TuneError(str(error).partition("; details:")[0]) from error
    return ranked(suite, result.trials, CHECKPOINT, TASK, faults)


def _require_different(uris: Sequence[str]) -> None:
    """Raise ConfigError if two of them are the same place, however they are written."""
    known: dict[str, str] = {}
    for uri in uris:
        try:
            place = open_storage(uri).uri
        except EbbtideError:  # is listed with the reason
            place = uri
        if place in known:
            as_well = "" if known[place] == uri else f", as {known[place]}, too"
            raise ConfigError(f"{uri} is given twice{as_well}")
        known[place] = uri


def fault(uri: str, base: TrainConfig | None) -> str | None:
    """Why there is nothing to score at a URI, as far as its manifest tells; None if there is."""
    try:
        storage = open_storage(uri)
        if export_manifest.read(storage) is not None:
            return NO_BASE.format(uri=uri) if base is None else None
        if manifest.newest(storage) is None:  # then it is no run's
            manifest.read_manifest(storage)
    except NotFound:
        return f"{uri} is no complete checkpoint, no run with one, and no export"
    except EbbtideError as error:
        return str(error)
    return None
