"""Ray Tune without what a sweep does not use, in a process of its own; pins what Ray imports."""

from __future__ import annotations

import subprocess
import sys

LEFT_OUT = """\
import sys
from ebbtide.platform.ray_seam.tune_import import import_tune
import_tune("ebbtide.tune.tuner")
left_out = ["pandas", "ray.data", "requests", "jsonschema", "filelock", "rich"]
assert not [name for name in left_out if name in sys.modules]
import ray
assert "data" not in vars(ray)

import ray.tune.result_grid
import pandas
assert ray.tune.result_grid.pd is not pandas  # it was left out, and yet
assert ray.tune.result_grid.pd.DataFrame is pandas.DataFrame
from ray.tune.impl import out_of_band_serialize_dataset as datasets
assert datasets.ray.data.Dataset is sys.modules["ray.data"].Dataset
assert ray.data.Dataset.take_all

import rich.layout, filelock
from ray.tune.experimental import output
from ray._private.runtime_env import packaging
assert output.rich is not rich and output.rich.layout.Layout is rich.layout.Layout
assert output.rich.live.Live
assert type(packaging.FileLock("lock")) is filelock.FileLock
"""
MEANWHILE = """\
from ebbtide.platform.ray_seam import tune_import
with tune_import._standing_in():
    import filelock
    lock = filelock.FileLock("lock")
import filelock
assert type(lock) is filelock.FileLock
"""
KEPT = """\
import pandas
from ebbtide.platform.ray_seam.tune_import import import_tune
import_tune("ray.tune.schedulers")
import ray.tune.result_grid
assert ray.tune.result_grid.pd is pandas
"""


def passes(program: str) -> bool:
    return subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0


def test_what_a_sweep_does_not_use_is_imported_when_it_is_used() -> None:
    assert passes(LEFT_OUT)
    assert passes(MEANWHILE)


def test_what_is_imported_already_is_kept() -> None:
    assert passes(KEPT)
