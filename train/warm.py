"""What a rank's process imports before it is needed: the setup hook of the run's worker processes.

Imports only, and what is imported late in a first step; no process group, no device, no thread.
"""

from __future__ import annotations

import importlib
import logging

from ebbtide.platform.ray_seam.workers import RANK_MODULE, announce_prepared

logger = logging.getLogger(__name__)

HOOK = "ebbtide.train.warm.warm"
"""The name under which Ray finds :func:`warm`."""

MODULES = (
    "torch",
    "torch._dynamo",  # imported by the first optimizer step
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "ray.train.torch",
    RANK_MODULE,
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "ebbtide.train.loop",
    "ebbtide.train.worker",
)
"""In the order in which they are imported."""


def warm() -> None:
    """Import what a rank needs. Nothing that goes wrong here is an error: the rank will say so."""
    for name in MODULES:
        try:
            importlib.import_module(name)
        except Exception:
            logger.warning("%s cannot be imported ahead of time", name, exc_info=True)
    announce_prepared()
