"""The pool: named, detached evaluators that outlive sweeps and drivers, and a sweep's hold on them.

An evaluator reserves nothing in Ray. A sweep reserves CPUs on the evaluator's node for as long as
it lives, in a placement group that Ray removes with the sweep's driver. So an idle pool is in
nobody's way, and a killed driver leaves nothing reserved. Promises: a seat whose evaluator has died
is filled again; an evaluator that runs other code than the sweep's is replaced.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import ebbtide
from ebbtide.platform.errors import ClusterError, TuneError
from ebbtide.platform.ray_seam.state import job_is_dead
from ebbtide.tune.config import PoolConfig
from ebbtide.tune.evaluator import Evaluator
from ebbtide.tune.nursery import Nursery
from ebbtide.tune.seat import Seat, name_of
from ebbtide.tune.sharing import Lease

_log = logging.getLogger(__name__)
_NOTICE_S = 30.0
_POLL_S = 0.02
_RETRY_S = 0.3
_FOLDERS = ("platform", "train", "tune")


def code_digest() -> str:
    """What an evaluator shares with the sweeps that use it: ebbtide's code, and the job's files."""
    root = Path(ebbtide.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(file for name in _FOLDERS for file in (root / name).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    uploaded = ray.get_runtime_context().runtime_env.get("working_dir", "")
    digest.update(str(uploaded).encode())
    return digest.hexdigest()[:16]


class EvaluatorActor(Evaluator):
    """An evaluator inside a Ray actor."""

    def __init__(self, name: str, namespace: str, code: str, idle_timeout_s: float | None) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        facts = {"name": name, "node_id": node_id, "code": code}
        retire = None if idle_timeout_s is None else functools.partial(_end, name, namespace)
        super().__init__(
            facts,
            job_is_dead,
            Nursery(),
            idle_timeout_s=idle_timeout_s or math.inf,
            retire=retire,
        )
        self.warm_up()  # also after Ray has restarted it


def _end(name: str, namespace: str) -> None:
    """End an evaluator for good, from within as well."""
    actor = find(name, namespace)
    if actor is not None:
        ray.kill(actor, no_restart=True)


def find(name: str, namespace: str) -> Any | None:
    """The handle of an evaluator, if there is one by this name."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def _create(index: int, config: PoolConfig, code: str, node_id: str) -> Any:
    name, namespace = name_of(index), config.namespace
    idle_timeout_s = config.idle_timeout_s if index >= config.min else None
    return (
        ray.remote(EvaluatorActor)
        .options(
            name=name,
            namespace=namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            # A soft affinity goes astray now and then; a hard one ends the actor with its node.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(name, namespace, code, idle_timeout_s)
    )


@dataclass
class Pool:
    """A sweep's hold on its evaluators. Use as a context manager; ``poll`` moves it on.

    ``on_use`` hears, when a seat is given back, for how many seconds it was taken.
    """

    config: PoolConfig
    lease: Lease = field(init=False)
    seats: list[Seat] = field(default_factory=list)
    code: str = field(default_factory=code_digest)
    on_use: Callable[[Seat, float], None] = lambda seat, seconds: None

    def __enter__(self) -> Pool:
        self.lease = Lease(
            uuid4().hex[:12],
            ray.get_runtime_context().get_job_id(),
            self.config.priority,
            self.config.weight,
        )
        self.seats = [Seat(index) for index in range(self.config.size)]
        self.poll()
        return self

    def __exit__(self, *exc: object) -> None:
        for seat in self.seats:
            if seat.joined or seat.joining is not None:
                seat.actor.release.remote(self.lease.sweep_id)
            seat.unreserve()
        self.seats = []

    def wait(self, count: int = 1) -> None:
        """Until ``count`` seats are ready. Raises ClusterError at ``start_timeout_s``."""
        started_s, noticed = time.monotonic(), False
        while (ready := sum(seat.ready for seat in self.seats)) < count:
            waited_s = time.monotonic() - started_s
            have = f"{ready} of {count} evaluators after {waited_s:.0f} s"
            if waited_s > self.config.start_timeout_s:
                raise ClusterError(f"{have}: {self._shortage()}")
            if waited_s > _NOTICE_S and not noticed:
                noticed = True
                _log.warning("%s, still waiting: %s", have, self._shortage())
            self._wait_for_news(_POLL_S if waited_s > 1 else _POLL_S / 4)
            self.poll()

    def _wait_for_news(self, limit_s: float) -> None:
        if self.pending():
            ray.wait(self.pending(), timeout=limit_s)
        else:
            time.sleep(limit_s)

    def _shortage(self) -> str:
        free = ray.available_resources().get("CPU", 0.0)
        total = ray.cluster_resources().get("CPU", 0.0)
        if any(seat.joining is not None for seat in self.seats):
            return "another sweep holds them, or they are still warming up"
        return (
            f"an evaluator needs {self.config.cpus:g} CPUs on one node, the cluster has {total:g} "
            f"({free:g} free); add nodes, end other jobs or lower pool.cpus"
        )

    def poll(self) -> None:
        """Move every seat on as far as it goes without waiting."""
        for seat in self.seats:
            if not seat.ready and time.monotonic() >= seat.retry_at_s:
                self._advance(seat)

    def held_nodes(self) -> dict[str, str]:
        """The node of every seat that is ready, by the seat's name."""
        return {
            seat.name: seat.node_id
            for seat in self.seats
            if seat.ready and seat.node_id is not None
        }

    def any_free(self) -> bool:
        return any(seat.free for seat in self.seats)

    def take(self) -> Seat | None:
        """A free seat, now held, or None."""
        for seat in self.seats:
            if seat.free:
                seat.busy, seat.busy_since_s = True, time.monotonic()
                return seat
        return None

    def swap(self, seat: Seat, wanted: Seat) -> Seat:
        """``wanted`` in exchange for a held seat if it is free, else that one."""
        if wanted is seat or not wanted.free:
            return seat
        seat.busy, wanted.busy = False, True
        wanted.busy_since_s = seat.busy_since_s
        return wanted

    def give_back(self, seat: Seat, *, broken: bool, yielded: bool = False) -> None:
        """Let a seat go. A broken one is joined again before it is free; one that was yielded to
        another sweep is waited for, and its CPUs are the other's meanwhile."""
        seat.busy = False
        self.on_use(seat, time.monotonic() - seat.busy_since_s)
        if broken:
            self._rejoin(seat)
        elif yielded:
            seat.unreserve()
            self._rejoin(seat, after_s=0.0)

    def pending(self) -> list[Any]:
        """Calls whose end lets a seat move on."""
        return [seat.joining for seat in self.seats if seat.joining is not None]

    def _rejoin(self, seat: Seat, after_s: float = _RETRY_S) -> None:
        seat.actor, seat.joining, seat.joined, seat.node_id = None, None, False, None
        seat.retry_at_s = time.monotonic() + after_s

    def _advance(self, seat: Seat) -> None:
        if seat.group is not None and not seat.group_ready:
            if not seat.look_for_cpus(self.config.cpus):
                return
            if seat.joined and seat.reserved_node() != seat.node_id:
                self._replace(seat, "its node is busy, another is not")
                return
        if seat.actor is None:
            seat.actor = find(seat.name, self.config.namespace)
        if seat.actor is None:
            node_id = seat.reserved_node()
            if node_id is None:
                seat.reserve(self.config.cpus, None)
                return
            seat.actor = _create(seat.index, self.config, self.code, node_id)
        if seat.joining is None and not seat.joined:
            seat.joining = seat.actor.acquire.remote(self.lease)
        if seat.joining is not None and ray.wait([seat.joining], timeout=0)[0]:
            self._join(seat)
        if seat.joined and seat.reserved_node() != seat.node_id:
            seat.reserve(self.config.cpus, seat.node_id)

    def _join(self, seat: Seat) -> None:
        joining, seat.joining = seat.joining, None
        try:
            facts = ray.get(joining)
        except RayTaskError as error:
            if isinstance(error.cause, TuneError):
                raise error.cause from error
            raise
        except RayError:
            self._rejoin(seat)  # Ray is restarting it, or it is gone and its name free
            return
        usable = any(
            node["NodeID"] == facts["node_id"]
            and node["Alive"]
            and node["Resources"].get("CPU", 0) >= self.config.cpus
            for node in ray.nodes()
        )
        if facts["code"] == self.code and usable:
            seat.joined, seat.node_id = True, facts["node_id"]
            seat.warm_s = facts["warm_s"]
            return
        why = "its node cannot take it" if facts["code"] == self.code else "it runs other code"
        self._replace(seat, why)

    def _replace(self, seat: Seat, why: str) -> None:
        """End an evaluator; another one is started wherever there are CPUs."""
        _log.info("replacing %s: %s", seat.name, why)
        ray.kill(seat.actor, no_restart=True)
        self._rejoin(seat)
