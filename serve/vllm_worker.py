"""The extension of vLLM's workers; importing it is the hook.

vLLM imports ``WorkerExtension`` by name in the process of each worker (on CPUs the engine's own)
before the worker makes its NIXL agent or loads a model, and offers no other call at that moment.
"""

from __future__ import annotations

from ebbtide.serve import amx, gloo_loop, nixl_progress

nixl_progress.install()
gloo_loop.install()
amx.ask()


class WorkerExtension:
    """Mixed into vLLM's worker class; adds nothing to it."""
