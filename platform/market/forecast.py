"""Before launch: what a job will cost and when it will finish, by policy and zones.

Monte Carlo: each sample is one stretch of the market as long as the deadline, and every choice of
policy and zones is simulated in the same samples. Stretches come from the zones' traces, from
anywhere in them, or, where the traces are shorter than the deadline or there are none, from a
model: made-up independent zones with the hazards that were fitted to a trace, or with the mean
times of the job file. Chance and intervals are of these samples: they hold if the market goes on as
it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from ebbtide.platform.config import Config
from ebbtide.platform.errors import ConfigError
from ebbtide.platform.market.baselines import PricePause
from ebbtide.platform.market.hazard import PRIOR_PER_HOUR, Array, Spells, draw_series
from ebbtide.platform.market.policy import Policy, Terms
from ebbtide.platform.market.simulator import Outcome, past, simulate
from ebbtide.platform.market.study import POLICIES, Job
from ebbtide.platform.market.traces import Trace, align, read_trace

Positive = Annotated[float, Field(gt=0)]
PAST_H = 240.0
"""Hours of a made-up past that a policy may learn from, as it may from a trace."""


class ZoneConfig(Config):
    """A spot zone: a trace of it, or its mean hours with spot and without. ``usd_per_hour`` of a
    node stands over the prices of the trace."""

    trace: Path | None = None
    hours_between_evictions: Positive | None = None
    hours_without_spot: Positive | None = None
    usd_per_hour: Positive | None = None

    @model_validator(mode="after")
    def _one_source(self) -> ZoneConfig:
        times = (self.hours_between_evictions, self.hours_without_spot)
        if (self.trace is None) == (times == (None, None)) or (None in times) != (
            times == (None, None)
        ):
            raise ValueError("give trace, or hours_between_evictions and hours_without_spot")
        return self


class ForecastConfig(Config):
    """The job file of ``ebbtide simulate --job``. Hours are wall time; ``work_hours`` is progress
    without any restart; dollars are of one node."""

    work_hours: Positive
    deadline_hours: Positive
    restart_hours: Annotated[float, Field(ge=0)] = 0.1
    nodes: Annotated[int, Field(ge=1)] = 1
    on_demand_usd_per_hour: Positive
    zones: Annotated[dict[str, ZoneConfig], Field(min_length=1)]
    policies: Annotated[tuple[str, ...], Field(min_length=1)] = (
        "tide",
        "on_demand",
        "greedy",
        "spot_with_fallback",
        "uniform_progress",
    )
    pause_above_usd_per_hour: Positive | None = None
    market: Literal["traces", "model"] = "traces"
    samples: Annotated[int, Field(ge=1, le=100_000)] = 100
    seed: Annotated[int, Field(ge=0)] = 0

    @property
    def job(self) -> Job:
        """What is to be run; spot prices are those of the zones."""
        return Job(
            work_s=self.work_hours * 3600,
            deadline_s=self.deadline_hours * 3600,
            restart_s=self.restart_hours * 3600,
            on_demand_usd=self.on_demand_usd_per_hour,
            spot_usd=0.0,
            nodes=self.nodes,
        )

    @model_validator(mode="after")
    def _possible(self) -> ForecastConfig:
        if problem := self.job.impossible():
            raise ValueError(f"deadline_hours cannot be kept: {problem}")
        unknown = [name for name in self.policies if name not in POLICIES]
        if unknown:
            raise ValueError(f"policies: {unknown[0]} is not one of {', '.join(POLICIES)}")
        if "price_pause" in self.policies and self.pause_above_usd_per_hour is None:
            raise ValueError("pause_above_usd_per_hour is missing, which price_pause needs")
        for name, zone in self.zones.items():
            if zone.trace is None and zone.usd_per_hour is None:
                raise ValueError(f"zones.{name}.usd_per_hour is missing: no trace gives it a price")
        return self


@dataclass(frozen=True)
class Spread:
    """Median and the middle 80% of samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, median, high = np.percentile(values, [10, 50, 90])
        return cls(float(median), float(low), float(high))


@dataclass(frozen=True)
class Choice:
    """One policy in some zones. ``hours`` to the finish are of the samples that met the deadline,
    None where none did; ``mean_usd`` is what choices are ranked by."""

    policy: str
    zones: tuple[str, ...]
    usd: Spread
    mean_usd: float
    hours: Spread | None
    chance: float
    evictions: float


@dataclass(frozen=True)
class Forecast:
    """All choices, the best first: those that met the deadline most often, then the cheapest."""

    choices: tuple[Choice, ...]
    sources: Mapping[str, str]
    """By zone, where its samples come from."""

    @property
    def best(self) -> Choice:
        return self.choices[0]

    @property
    def on_demand(self) -> Choice | None:
        """What on-demand alone would cost, if it was asked for."""
        return next((choice for choice in self.choices if choice.policy == "on_demand"), None)


def forecast(config: ForecastConfig, folder: Path) -> Forecast:
    """Simulate every policy in every zone and in all together. Traces are relative to ``folder``.

    Raises DataError for a trace that is none, ConfigError for prices that are not known.
    """
    job = config.job
    draw = np.random.default_rng(config.seed)
    samples, history, sources = _samples(config, job, folder, draw)
    names = list(config.zones)
    groups: list[tuple[int, ...]] = [(index,) for index in range(len(names))]
    if len(names) > 1:
        groups.append(tuple(range(len(names))))
    choices = []
    for name in dict.fromkeys(config.policies):
        policy = _policy(name, config)
        for group in groups if name != "on_demand" else groups[-1:]:
            terms = replace(
                job.terms([samples[0][zone] for zone in group]),
                history=past(tuple(history[zone] for zone in group), job.nodes),
            )
            outcomes = [
                _run(policy, terms, job, [sample[zone] for zone in group]) for sample in samples
            ]
            zones = () if name == "on_demand" else tuple(names[zone] for zone in group)
            choices.append(_choice(name, zones, outcomes))
    choices.sort(key=lambda choice: (-choice.chance, choice.mean_usd))
    return Forecast(tuple(choices), sources)


def _policy(name: str, config: ForecastConfig) -> Policy:
    if name == "price_pause" and config.pause_above_usd_per_hour is not None:
        return PricePause(config.pause_above_usd_per_hour)
    return POLICIES[name]


def _run(policy: Policy, terms: Terms, job: Job, zones: list[Trace]) -> Outcome:
    return simulate(policy, terms, job.window(zones, 0, terms))


def _choice(policy: str, zones: tuple[str, ...], outcomes: list[Outcome]) -> Choice:
    met = [outcome.finished_s / 3600 for outcome in outcomes if outcome.finished_s is not None]
    usd = [outcome.usd for outcome in outcomes]
    return Choice(
        policy=policy,
        zones=zones,
        usd=Spread.of(usd),
        mean_usd=float(np.mean(usd)),
        hours=Spread.of(met) if met else None,
        chance=len(met) / len(outcomes),
        evictions=float(np.mean([outcome.evictions for outcome in outcomes])),
    )


def _samples(
    config: ForecastConfig, job: Job, folder: Path, draw: np.random.Generator
) -> tuple[list[list[Trace]], list[Trace], dict[str, str]]:
    """Stretches of the market (one trace a zone each), a past to learn from, and the sources."""
    traces = {
        name: _priced(read_trace(folder / zone.trace), zone, name)
        for name, zone in config.zones.items()
        if zone.trace is not None
    }
    if len(traces) == len(config.zones) and config.market == "traces":
        zones = align(traces.values(), job.tick_s)
        ticks = int(job.deadline_s / zones[0].tick_s + 1e-9)
        longest = len(zones[0].nodes)
        if longest >= ticks:
            starts = draw.integers(0, longest - ticks + 1, size=config.samples)
            cut = [[zone.between(at, at + ticks) for zone in zones] for at in starts.tolist()]
            return cut, list(zones), dict.fromkeys(config.zones, "trace")
    tick_s = job.tick_s
    hazards: dict[str, Array] = {}
    usd: dict[str, float] = {}
    for name, zone in config.zones.items():
        if name in traces:
            sampled = traces[name].resample(tick_s)
            able = (sampled.nodes >= job.nodes).astype(np.uint8)
            hazards[name] = Spells.of(able, sampled.tick_s).per_hour()
            usd[name] = float(np.mean(_prices(traces[name])))
        else:
            means = np.array([[zone.hours_without_spot], [zone.hours_between_evictions]])
            hazards[name] = np.ones_like(PRIOR_PER_HOUR) / means.astype(np.float64)
            usd[name] = zone.usd_per_hour or 0.0

    def made_up(name: str, hours: float) -> Trace:
        ticks = int(hours * 3600 / tick_s + 1e-9)
        skipped = int(draw.integers(0, int(PAST_H * 3600 / tick_s)))
        series = draw_series(hazards[name], tick_s, skipped + ticks, draw)[skipped:]
        nodes = series.astype(np.int64) * job.nodes
        return Trace(name, tick_s, nodes, np.full(len(nodes), usd[name]))

    history = [made_up(name, PAST_H) for name in config.zones]
    samples = [
        [made_up(name, config.deadline_hours) for name in config.zones]
        for _ in range(config.samples)
    ]
    sources = {
        name: "model fitted to its trace" if name in traces else "model of mean times"
        for name in config.zones
    }
    return samples, history, sources


def _priced(trace: Trace, zone: ZoneConfig, name: str) -> Trace:
    if zone.usd_per_hour is not None:
        prices = np.full(len(trace.nodes), zone.usd_per_hour)
        return Trace(name, trace.tick_s, trace.nodes, prices)
    if trace.usd_per_hour is None:
        raise ConfigError(
            f"zones.{name}: its trace has no prices; give zones.{name}.usd_per_hour, the spot "
            "price of a node in dollars an hour"
        )
    return Trace(name, trace.tick_s, trace.nodes, trace.usd_per_hour)


def _prices(trace: Trace) -> Array:
    assert trace.usd_per_hour is not None  # _priced
    return trace.usd_per_hour
