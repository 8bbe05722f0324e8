"""The pool as a whole: its evaluators by name, started ahead, asked and ended."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from ebbtide.tune.config import PoolConfig
from ebbtide.tune.pool import Pool, find
from ebbtide.tune.running import Memory


def up(config: PoolConfig) -> list[dict[str, Any]]:
    """Start what the pool lacks and wait until every evaluator is warm; the pool's status."""
    with Pool(config) as pool:
        pool.wait(config.size)
    return status(config.namespace)


def _members(namespace: str) -> Iterator[tuple[str, Any]]:
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == namespace:
            actor = find(entry["name"], namespace)
            if actor is not None:
                yield entry["name"], actor


def status(namespace: str, timeout_s: float = 10.0) -> list[dict[str, Any]]:
    """The evaluators of a pool, by name; one that does not answer in time says so."""
    asked = [(name, actor.status.remote()) for name, actor in sorted(_members(namespace))]
    answered, _ = (
        ray.wait([ref for _, ref in asked], num_returns=len(asked), timeout=timeout_s)
        if asked
        else ([], [])
    )
    found = []
    for name, ref in asked:
        try:
            found.append({**ray.get(ref), "answers": True} if ref in answered else _mute(name))
        except RayActorError:
            found.append(_mute(name))
    return found


def recall(namespace: str, sweep: str, timeout_s: float = 10.0) -> list[Memory]:
    """What the evaluators that answer in time remember of a sweep's trials."""
    asked = [actor.recall.remote(sweep) for _, actor in _members(namespace)]
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=timeout_s) if asked else ([], [])
    found: list[Memory] = []
    for ref in answered:
        with contextlib.suppress(RayError):  # it has died, or runs another version
            found.extend(ray.get(ref))
    return found


def _mute(name: str) -> dict[str, Any]:
    return {"name": name, "answers": False}


def down(namespace: str) -> int:
    """End a pool's evaluators, and the trials on them; how many there were."""
    members = list(_members(namespace))
    for _, actor in members:
        ray.kill(actor, no_restart=True)
    return len(members)
