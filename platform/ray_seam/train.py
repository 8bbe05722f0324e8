"""Ray Train's ``TorchTrainer``, made elastic and quick to recover.

:class:`ElasticTrainer` has the two decisions of Ray's controller taken by objects of ours (how many
workers there are and where, and whether to go on after a failure), with settings that recover in
seconds, and with workers that are killed, not asked, when a group is ended. Ray's own watcher of
preemptions is off: it would wait for the deadline of a notice before restarting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ray
import ray.exceptions
from ray._common.constants import RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR
from ray._private.worker import get_dashboard_url
from ray.train import Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.callbacks import DatasetsCallback, WorkingDirectorySetupCallback
from ray.train.v2._internal.callbacks.placement_group_callback import (
    PlacementGroupCleanerCallback,
)
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group import state, worker_group
from ray.train.v2._internal.util import time_monotonic
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ebbtide.platform import signals
from ebbtide.platform.ray_seam import environment
from ebbtide.platform.ray_seam.decisions import Judge, Scaling
from ebbtide.platform.ray_seam.train_group import PlacedGroup
from ebbtide.platform.ray_seam.train_policies import ElasticPolicy, JudgingPolicy, PlaceRanks

_ABORT_TIMEOUT_S = 20.0
_TICK_S = 0.5
_LEFT_POLL_S = 0.05


class _KillWorkers(_TorchBackend):  # type: ignore[misc]  # untyped base
    """Sets the process group up as Ray does, and does not take it down: the ranks are killed."""

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        return None


class _KilledTorchConfig(TorchConfig):  # type: ignore[misc]  # untyped base
    @property
    def backend_cls(self) -> type[_KillWorkers]:
        return _KillWorkers


class _NoSynchronizer:
    """Stands where Ray Train has the class of an actor at which ranks meet before they report.

    Ours report nothing, and each start of a group would start a process of it, beside the ranks.
    They are given the controller in its place.
    """

    def options(self, **_: Any) -> _NoSynchronizer:
        return self

    def remote(self, **_: Any) -> Any:
        return ray.get_runtime_context().current_actor


class ElasticController(TrainController):  # type: ignore[misc]  # untyped base
    """Ray's controller, with ranks placed by ours, no wait for a group that has left, and a pause
    where it would spin for nodes. What is left of the last group is ended then, which Ray does only
    when the next one starts. To be the only one in its process."""

    worker_group_cls = PlacedGroup
    _latest_poll_time: float

    def __init__(
        self, *, scaling_policy: ElasticPolicy, callbacks: list[Any], **others: Any
    ) -> None:
        # one object decides on number and place: two arguments would be two copies
        callbacks = [*callbacks, PlaceRanks(scaling_policy.scaling)]
        worker_group.SynchronizationActor = _NoSynchronizer()
        state._shutdown_sync_actor = lambda actor: None
        super().__init__(scaling_policy=scaling_policy, callbacks=callbacks, **others)

    async def _poll_workers(self) -> Any:
        last_s = self._latest_poll_time
        while (now_s := time_monotonic()) < last_s + self._health_check_interval_s:
            if self._scaling_policy.scaling.has_left():
                break
            await asyncio.sleep(_LEFT_POLL_S)
        # the rest of the wait is Ray's, which looks after it whether it was aborted
        self._latest_poll_time = now_s - self._health_check_interval_s + _LEFT_POLL_S
        return await super()._poll_workers()

    async def _step(self) -> Any:
        before = self.get_state()
        result = await super()._step()
        if result.next_state is before:  # it waits for nodes, and is to hold none meanwhile
            if self.get_worker_group() is not None:
                self._shutdown_worker_group()
            await asyncio.sleep(_TICK_S)
        return result


class ElasticTrainer(TorchTrainer):  # type: ignore[misc]  # untyped base
    """See the module. ``tick`` is called in the driver about twice a second while it runs.

    What ``tick`` raises, and an interrupt, end the run: the controller kills the ranks first.
    """

    def __init__(
        self,
        train: Callable[[], None],
        *,
        scaling: Scaling,
        judge: Judge,
        tick: Callable[[], None],
        scaling_config: ScalingConfig,
        run_config: RunConfig,
        process_group_timeout_s: int,
    ) -> None:
        super().__init__(
            train,
            torch_config=_KilledTorchConfig(timeout_s=process_group_timeout_s),
            scaling_config=scaling_config,
            run_config=run_config,
        )
        self._scaling, self._judge, self._tick = scaling, judge, tick

    def _create_default_callbacks(self) -> list[Any]:
        """Ray's, without what moves ranks away from their working directory, and without two
        processes: one for datasets of Ray Data, which are not used and whose start every generation
        would wait for, and one that watches over the placement group, which ends with this driver
        anyway."""
        unwanted = (
            WorkingDirectorySetupCallback
            | DatasetsCallback
            | PlacementGroupCleanerCallback
            | StateManagerCallback
        )
        callbacks = [
            callback
            for callback in super()._create_default_callbacks()
            if not isinstance(callback, unwanted)
        ]
        if get_dashboard_url():
            callbacks.append(StateManagerCallback(datasets={}))
        return callbacks

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        arguments["scaling_policy"] = ElasticPolicy(self.scaling_config, self._scaling)
        arguments["failure_policy"] = JudgingPolicy(self.run_config.failure_config, self._judge)
        variables = {
            "RAY_ADDRESS": ray.get_runtime_context().gcs_address,  # for its helpers' sake
            RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR: "0",
            **environment.CONTROLLER,
            **get_env_vars_to_propagate(),
        }
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        controller = (
            ray.remote(ElasticController)
            .options(num_cpus=0, scheduling_strategy=here, runtime_env={"env_vars": variables})
            .remote(**arguments)
        )
        running = controller.run.remote()
        try:
            with signals.renewed():  # no further one disturbs the abort
                while not ray.wait([running], timeout=_TICK_S)[0]:
                    self._tick()
                ray.get(running)
                self._tick()
                return ray.get(controller.get_result.remote())
        except BaseException:
            self._abort(controller)
            raise

    def _abort(self, controller: Any) -> None:
        try:
            ray.get(controller.abort.remote(), timeout=_ABORT_TIMEOUT_S)
        except ray.exceptions.RayActorError:
            pass  # it exits by itself when it is done
        except ray.exceptions.GetTimeoutError:
            ray.kill(controller)
