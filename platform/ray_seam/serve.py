"""The end of Ray Serve, without its own reports of it. Imports no vLLM."""

from __future__ import annotations

import contextlib
import logging

from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

log = logging.getLogger(__name__)


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
