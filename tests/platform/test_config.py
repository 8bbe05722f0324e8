from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import model_validator

from ebbtide.platform.config import Config, LocalFile, dump, load, parse
from ebbtide.platform.errors import ConfigError


class Optimizer(Config):
    lr: float
    name: str = "adamw"


class Workers(Config):
    min: int = 1
    max: int = 1


class Job(Config):
    name: str = "job"
    steps: int = 1
    resume: bool = False
    optimizer: Optimizer = Optimizer(lr=0.1)
    workers: Workers = Workers()
    stages: list[Workers] = []

    @model_validator(mode="after")
    def _enough_steps(self) -> Job:
        if self.workers.max > max(self.steps, 1):
            raise ValueError("workers.max must not exceed steps")
        return self


def refused(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, Job, "job.yaml", overrides)
    return str(caught.value)


def test_an_unknown_key_is_refused_with_line_path_and_nearest_key() -> None:
    message = refused("name: a\nworkers:\n  mim: 2\n")
    assert message == "job.yaml:3: workers.mim is not a known key; did you mean min?"


def test_an_unknown_key_inside_a_list_is_refused() -> None:
    message = refused("stages:\n  - min: 1\n  - maxx: 2\n")
    assert message == "job.yaml:3: stages.1.maxx is not a known key; did you mean max?"


def test_a_key_unlike_all_others_lists_those_that_are_known() -> None:
    assert "known keys: max, min" in refused("workers: {zzzzzz: 1}\n")


def test_a_duplicate_key_is_refused_with_both_lines() -> None:
    message = refused("name: a\nsteps: 1\nname: b\n")
    assert message == "job.yaml:3: name is given twice (first on line 1); remove one"


def test_every_fault_is_told_at_once() -> None:
    assert len(refused("stepps: 1\nworkers: {mim: 1}\nsteps: many\n").splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("steps: many\n", "job.yaml:1: steps:"),
        ("steps: 1.5\n", "steps"),
        ("optimizer:\n  lr: .nan\n", "job.yaml:2: optimizer.lr"),
        ("optimizer: {}\n", "optimizer.lr is missing"),
        ("optimizer: 3\n", "job.yaml:1: optimizer"),
        ("- a\n- b\n", "must be a mapping"),
        ("a: [1\n", "not valid YAML"),
        ("1: a\n", "must be text"),
        ("steps: !!int many\n", "not valid YAML"),
        ("stages: &a [*a]\n", "an alias that holds itself"),
        ("name: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(text: str, told: str) -> None:
    assert told in refused(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1E3", 1000.0), ("3", 3.0), (".5", 0.5), ("-2.5e+1", -25.0), ("5.", 5.0)],
)
def test_numbers_are_those_of_yaml_1_2(text: str, value: float) -> None:
    assert parse(f"optimizer: {{lr: {text}}}", Job).optimizer.lr == value


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("steps: true\n", "job.yaml:1: steps: must be a number (found True)"),
        ('steps: "2"\n', "job.yaml:1: steps: must be a number (found '2')"),
        ("optimizer: {lr: 1_000}\n", "job.yaml:1: optimizer.lr: must be a number"),
        ("resume: 1\n", "job.yaml:1: resume: must be true or false (found 1)"),
        ("stages: [{min: '1'}]\n", "job.yaml:1: stages.0.min: must be a number"),
    ],
)
def test_one_type_is_not_read_as_another(text: str, told: str) -> None:
    assert told in refused(text)


def test_a_rule_between_keys_names_the_key_and_its_line_and_shows_no_dump() -> None:
    message = refused("name: a\nsteps: 5\nworkers:\n  max: 9\n")
    assert message == "job.yaml:4: workers.max must not exceed steps"


@pytest.mark.parametrize("word", ["no", "on", "yes", "off", "012:30", "2026-01-01"])
def test_words_that_yaml_1_1_would_change_stay_text(word: str) -> None:
    assert parse(f"name: {word}", Job).name == word


def test_an_empty_file_is_all_defaults() -> None:
    assert parse("", Job) == Job()


def test_overrides_are_yaml_at_a_dotted_path() -> None:
    job = parse("name: a\n", Job, overrides=["optimizer.lr=3e-4", "steps=7", "resume=true"])
    assert (job.optimizer.lr, job.steps, job.resume) == (3e-4, 7, True)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("steps", "write KEY.PATH=VALUE"),
        ("..=1", "write KEY.PATH=VALUE"),
        ("stepps=1", "--set stepps=1: stepps is not a known key; did you mean steps?"),
        ("optimizr.lr=1", "--set optimizr.lr=1: optimizr is not a known key"),
        ("steps=2.5", "--set steps=2.5: steps:"),
        ("steps=true", "--set steps=true: steps: must be a number"),
        ("workers.max=5", "--set workers.max=5: workers.max must not exceed steps"),
        ("name.x=1", "holds no keys"),
        ("workers.mim=1", "did you mean min?"),
    ],
)
def test_a_wrong_override_is_refused(override: str, told: str) -> None:
    assert told in refused("name: a\n", override)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.yaml", Job)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "binary.yaml", Job)


@given(
    st.builds(
        Job,
        name=st.text(max_size=20),
        steps=st.integers(-(10**9), 10**9),
        resume=st.booleans(),
        optimizer=st.builds(Optimizer, lr=st.floats(allow_nan=False, allow_infinity=False)),
    )
)
@example(Job(name="0E0", steps=0, resume=False, optimizer=Optimizer(lr=0.0)))
@example(Job(name="0o7", steps=0, resume=False, optimizer=Optimizer(lr=1e-05)))
@example(Job(name="yes", steps=0, resume=False, optimizer=Optimizer(lr=1e300)))
def test_what_is_dumped_is_read_back_equal(job: Job) -> None:
    assert parse(dump(job), Job) == job


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_never_worse(text: str) -> None:
    try:
        parsed: Any = parse(text, Job)
    except ConfigError:
        return
    assert isinstance(parsed, Job)


class Priced(Config):
    catalogue: LocalFile | None = None


def test_the_path_of_a_local_file_may_begin_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse("catalogue: ~/prices.yaml", Priced).catalogue == f"{tmp_path}/prices.yaml"
    with pytest.raises(ConfigError, match="catalogue"):
        parse("catalogue: ''", Priced)
