"""Ray's handlers of SIGTERM are left out while a driver connects, and only then."""

from __future__ import annotations

import signal

import ray._private.utils

from ebbtide.platform import signals
from ebbtide.platform.ray_seam import handlers
from tests.platform.ray_seam.pins import Pins

PINS = Pins("handlers")


def test_ray_installs_its_handlers_by_the_function_that_is_replaced() -> None:
    PINS.takes("ray._private.utils:set_sigterm_handler", "sigterm_handler", others=False)
    call = "ray._private.utils.set_sigterm_handler(sigterm_handler)"
    PINS.says("ray._private.worker:init", call)
    PINS.says("ray._private.node:Node", call)


def test_a_handler_of_rays_is_left_out_and_only_within() -> None:
    with signals.kept():
        before = signal.getsignal(signal.SIGTERM)
        with handlers.left_out():
            ray._private.utils.set_sigterm_handler(signal.SIG_IGN)
            assert signal.getsignal(signal.SIGTERM) == before
        ray._private.utils.set_sigterm_handler(signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
