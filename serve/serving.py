"""A running endpoint's life: watched, given another model, and ended.

All that is done to its workers is done from here, one thing after the other.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from types import TracebackType

from ebbtide.platform.clock import Clock
from ebbtide.platform.errors import EbbtideError, ServeError
from ebbtide.serve import cluster, local_model, split
from ebbtide.serve.control import Ask, Control
from ebbtide.serve.interrupts import Interrupts
from ebbtide.serve.routers import Routers
from ebbtide.serve.scaling import Bounds, Scaler
from ebbtide.serve.update import Update, next_site
from ebbtide.serve.workers import Workers

log = logging.getLogger(__name__)

_WATCH_S = 10.0
"""Each look costs Ray Serve's controller and this process some 20 ms."""
_ADVISE_S = 60.0
_SCALE_S = 1.0
_BEAT_S = 0.2


class Serving:
    """A running endpoint; a context manager that stops it."""

    def __init__(
        self,
        workers: Workers,
        routers: Routers,
        resources: contextlib.ExitStack,
        interrupts: Interrupts,
        clock: Clock,
        first_port: int = 0,
    ) -> None:
        config = self._config = workers.config
        self.endpoint, self.model_name = config.endpoint, config.model_name
        self._workers, self._routers, self._resources = workers, routers, resources
        self._interrupts, self._clock, self._first_port = interrupts, clock, first_port
        self._num_generations = workers.generation
        self._counts = config.counts
        bounds = {role: Bounds(own.least, own.most) for role, own in config.roles.items()}
        self._scaler = Scaler(bounds, config.scaling)
        self._may_advise = config.mode != "colocated"
        self._was, self._looked_s = "running", clock.monotonic()
        self._advised_s = self._scaled_s = self._looked_s

    def __enter__(self) -> Serving:
        self._interrupts.may_raise = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the endpoint and all that was started for it. May be called more than once."""
        self._interrupts.may_raise = False
        self._resources.close()

    def wait(self) -> None:
        """Block for as long as the endpoint lives. Raises ServeError when it ends by itself,
        KeyboardInterrupt on SIGINT and SystemExit on SIGTERM.
        """
        self._interrupts.may_raise = False
        with contextlib.ExitStack() as stack:
            control = None
            try:
                control = stack.enter_context(Control(self._config))
            except (ServeError, OSError) as error:  # no reason not to serve
                log.warning("%s: cannot be asked for another model: %s", self._config.name, error)
            while True:
                self._pause(_BEAT_S)
                self.tend()
                if control is not None and (ask := control.next()) is not None:
                    self._answer(ask)

    def update(
        self,
        uri: str,
        say: Callable[[str], None] = log.info,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Have the endpoint answer by the model at ``uri`` from now on; returns when the workers of
        the one before have ended.

        Raises ServeError or ClusterError, with the old model still served unless it says otherwise.
        ``is_wanted`` is asked until requests are led to the new model.
        """
        before = self._workers
        model = before.config.model.model_copy(update={"uri": uri})
        config = local_model.absolute(before.config.model_copy(update={"model": model}))
        say(f"verifying {config.model.uri}")
        with self._interrupts.raising():
            cluster.on_head(local_model.check, config)
        self._num_generations += 1
        wanted = {role: max(1, number) for role, number in self._counts.items()}
        site = next_site(config, before.site, self._first_port, self._num_generations)
        update = Update(
            old=before,
            new=Workers(config, site, self._interrupts.check),
            counts=self._counts,
            wanted=wanted,
            routers=self._routers,
            clock=self._clock,
            pause=self._pause,
            say=say,
            is_wanted=is_wanted,
        )
        try:
            update.run()
        finally:
            if update.is_taken:
                self._workers, self._config, self._counts = update.new, config, wanted

    def _answer(self, ask: Ask) -> None:
        """Do what a command wants, and tell it how that went."""
        uri = str(ask.wanted.get("update"))
        log.info("%s: an update to %s is asked for", self._config.name, uri)

        def say(text: str) -> None:
            log.info("%s: %s", self._config.name, text)
            ask.say(text)

        try:
            self.update(uri, say, lambda: not ask.is_gone)
        except EbbtideError as error:
            log.error("%s: %s", self._config.name, error)
            ask.failed(error)
        except Exception as error:  # no reason for the endpoint to end
            log.exception("%s: the update failed", self._config.name)
            ask.failed(ServeError(f"the update failed: {error!r}; the endpoint's log has more"))
        except BaseException:
            ask.failed(ServeError("the endpoint ended before the update did"))
            raise
        else:
            log.info("%s: serving %s", self._config.name, self._config.model.uri)
            ask.done(f"{self._config.endpoint} serves {self._config.model.uri}")

    def _pause(self, seconds: float) -> None:
        self._interrupts.check()
        self._clock.sleep(seconds)

    def tend(self) -> None:
        """Do and tell what has to be from time to time, as :meth:`wait` does."""
        now_s = self._clock.monotonic()
        if self._config.scales and now_s - self._scaled_s >= _SCALE_S:
            self._scaled_s = now_s
            self._scale(now_s)
        if now_s - self._looked_s >= _WATCH_S:
            now, self._looked_s = self._workers.progress(), now_s
            if now.state != self._was:
                log.warning("%s: %s", self._config.name, now.text)
            self._was = now.state
        if now_s - self._advised_s >= _ADVISE_S:
            self._advised_s = now_s
            self._advise()

    def _scale(self, now_s: float) -> None:
        """Have as many workers as are needed."""
        if (known := self._routers.known()) is None:
            return
        wanted = self._scaler.decide(now_s, known, self._counts)
        if wanted != self._counts:
            was, now = (", ".join(f"{n} {r}" for r, n in c.items()) for c in (self._counts, wanted))
            log.info("%s: %s workers instead of %s", self._config.name, now, was)
            self._workers.scale(wanted)
            self._counts = wanted

    def _advise(self) -> None:
        """Say once if the workers would be better put to another use."""
        if not self._may_advise:
            return
        led = self._routers.prefills()
        if advice := split.better_colocated(led["local"], led["remote"]):
            log.info("%s: %s", self._config.name, advice)
            self._may_advise = False
