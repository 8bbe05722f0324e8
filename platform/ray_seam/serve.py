"""What Ray Serve has no public name for: its end without its own reports of it, and replicas that
are added and taken away by somebody else. Imports no vLLM.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import Any

from ray.experimental import internal_kv
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

log = logging.getLogger(__name__)

_TIMEOUT_S = 30.0
_NOTES = "ebbtide-serve"


def scale(application: str, num_replicas: int) -> None:
    """Have an application of one deployment, run with ``external_scaler_enabled``, have so many
    replicas from now on; those that are there already stay. Does not wait for them.

    What Serve's REST API offers for it, without its dashboard. Raises Ray's and Serve's errors.
    """
    import ray
    from ray import serve

    (name,) = serve.status().applications[application].deployments
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
    deployment = DeploymentID(name=name, app_name=application)
    ray.get(
        controller.update_deployment_replicas.remote(deployment, num_replicas), timeout=_TIMEOUT_S
    )


def end_applications(names: Iterable[str]) -> None:
    """Have applications end, and do not wait for it."""
    from ray import serve

    for name in names:
        serve.delete(name, _blocking=False)


def note(key: str, value: str) -> None:
    """Write something down where every process of the cluster finds it, for as long as that lives.

    In the cluster's control service, so that it outlives any actor.
    """
    put: Any = internal_kv._internal_kv_put
    put(key, value, overwrite=True, namespace=_NOTES)


def noted(key: str) -> str | None:
    """What was written down last under a key."""
    get: Any = internal_kv._internal_kv_get
    found: bytes | None = get(key, namespace=_NOTES)
    return None if found is None else found.decode()


def end_serve(timeout_s: float) -> None:
    """End Ray Serve with all its applications; what takes longer ends without being waited for.

    The controller answers by its own death. After Serve's own call, Ray would report that as a
    failed task.
    """
    import ray
    from ray import serve

    with contextlib.suppress(ValueError):  # there is none
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
        ending = controller.graceful_shutdown.options(max_task_retries=0).remote()
        try:
            ray.get(ending, timeout=timeout_s)
        except ray.exceptions.RayActorError:
            serve.shutdown()  # forgets what it knew of the controller
        except ray.exceptions.GetTimeoutError:
            log.warning("Ray Serve has not ended within %.0f s", timeout_s)
