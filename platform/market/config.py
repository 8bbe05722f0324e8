"""How a job chooses its nodes by market and zone: the ``market`` section of a job file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import AwareDatetime, BeforeValidator, Field, field_validator, model_validator

from ebbtide.platform.budget import timestamp
from ebbtide.platform.config import Config

if TYPE_CHECKING:  # every command reads the section's form, few the policies
    from ebbtide.platform.market.policy import Policy

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

NEED_DEADLINE = ("tide", "greedy", "uniform_progress", "uniform_progress_stay")
"""Policies that make no sense without a deadline."""

NEVER_S = 10 * 365 * 86400.0
"""The deadline of a job that has none."""


class MarketConfig(Config):
    """The policy decides every ``tick_s`` seconds in which market and zone the run's nodes are.

    ``zones`` are those in which spot nodes may be asked for: values of the node label
    ``ebbtide.dev/zone``, or ``any`` alone to leave it to the cloud. ``labels`` are further labels
    that the nodes must have. Prices are those of ``instance_type`` (``cost.instance_type`` if left
    out). ``workers_per_node`` says how many nodes the job's workers need. A zone that has not given
    enough spot nodes within ``give_up_s``, or has taken them away, is taken to have none for
    ``retry_s``. ``restart_s`` is what a start is taken to last, and ``hours`` what the whole job
    takes, until the run has measured its steps. ``pause_above_usd_per_hour`` (of one node) is
    ``price_pause``'s.
    """

    policy: str = "tide"
    zones: Annotated[tuple[str, ...], Field(min_length=1)]
    deadline: Annotated[AwareDatetime, BeforeValidator(timestamp)] | None = None
    hours: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    instance_type: str | None = None
    workers_per_node: Annotated[int, Field(ge=1)] = 1
    labels: dict[str, str] = {}
    restart_s: Seconds = 300.0
    give_up_s: Seconds = 180.0
    retry_s: Seconds = 900.0
    tick_s: Seconds = 15.0
    pause_above_usd_per_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @field_validator("policy")
    @classmethod
    def _is_known(cls, name: str) -> str:
        from ebbtide.platform.market.study import POLICIES

        if name not in POLICIES:
            raise ValueError(f"known policies are {', '.join(POLICIES)}")
        return name

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> MarketConfig:
        from ebbtide.platform.market.live import ANY_ZONE

        if self.deadline is None and self.policy in NEED_DEADLINE:
            raise ValueError(
                f"market.policy {self.policy} plans towards a deadline: give market.deadline, or "
                "another policy (spot_with_fallback, priority, on_demand)"
            )
        if (self.policy == "price_pause") != (self.pause_above_usd_per_hour is not None):
            raise ValueError("market.pause_above_usd_per_hour belongs to policy: price_pause")
        if self.retry_s < self.restart_s:
            raise ValueError(
                "market.retry_s is shorter than market.restart_s: nodes asked for elsewhere would "
                "not be up before the zone is tried again"
            )
        if len(set(self.zones)) < len(self.zones):
            raise ValueError("market.zones names a zone twice")
        if ANY_ZONE in self.zones and len(self.zones) > 1:
            raise ValueError("market.zones: any stands alone; name the zones, or none of them")
        return self

    def chosen(self) -> Policy:
        """The policy itself: the object that the simulator runs."""
        from ebbtide.platform.market.baselines import PricePause
        from ebbtide.platform.market.study import POLICIES

        if self.pause_above_usd_per_hour is not None:
            return PricePause(self.pause_above_usd_per_hour)
        return POLICIES[self.policy]
