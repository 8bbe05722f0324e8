"""What is private to Ray is used in ``platform/ray_seam`` only, and all of it exists."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import ray

ROOT = Path(__file__).parents[3]
SEAM = ROOT / "platform" / "ray_seam"
FOLDERS = ("platform", "train", "serve", "tune", "ebbtide/commands", "bench", "tools", "examples")
PUBLIC = {
    "ray",
    "ray.actor",
    "ray.exceptions",
    "ray.job_submission",
    "ray.serve.exceptions",
    "ray.serve.llm",
    "ray.serve.llm.deployment",
    "ray.train",
    "ray.train.torch",
    "ray.tune",
    "ray.tune.schedulers",
    "ray.tune.search.basic_variant",
    "ray.tune.search.optuna",
    "ray.util.metrics",
    "ray.util.placement_group",
    "ray.util.scheduling_strategies",
}
DOCUMENTED_VARIABLES = {
    "RAY_ADDRESS",
    "RAY_API_SERVER_ADDRESS",
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_COLOR_PREFIX",
    "RAY_TMPDIR",
    "RAY_USAGE_STATS_ENABLED",
}
JUDGED_BY_RAY = ("tests/test_cluster_yaml.py", "tests/test_kuberay.py")
"""They hold a user's file against Ray's own schema, for which there is no public name."""
PRIVATE_NAME = re.compile(r"\bray(\.\w+)*\.(_\w+|core\.generated|v2)\b")


def private_uses(source: str) -> Iterator[str]:
    """The lines of a source that use or name what is private to Ray, with what they use."""
    for node in ast.walk(ast.parse(source)):
        used: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            used = [name for name in names if name.split(".")[0] == "ray" and name not in PUBLIC]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            used = [name for name in names if node.module not in PUBLIC or "._" in name]
        elif isinstance(node, ast.Attribute):
            used = [ast.unparse(node)] if PRIVATE_NAME.fullmatch(ast.unparse(node)) else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_name = "\n" not in node.value and PRIVATE_NAME.search(node.value)
            is_variable = re.fullmatch(r"RAY_\w+[a-z0-9A-Z]", node.value)
            if is_name or (is_variable and node.value not in DOCUMENTED_VARIABLES):
                used = [repr(node.value)]
        yield from (f"line {node.lineno}: {each}" for each in used)  # type: ignore[attr-defined]


def test_a_private_use_is_found() -> None:
    for line in (
        "import ray._private.state",
        "from ray._private.state import state",
        "from ray.train.v2.api import config",
        "from ray.tune.execution.tune_controller import TuneController",
        "from ray.train import _internal",
        "import ray\n\n\ndef f():\n    return ray._raylet.x",
        "x = 'ray.train.v2._internal.execution'",
        "x = {'RAY_health_check_period_ms': '0'}",
    ):
        assert list(private_uses(line)), line
    for line in (
        "import ray, array",
        "from ray.train import Result",
        "x = 'RAY_ADDRESS'",
        "x = 'an array._x'",
        "y = ray.get(x)",
    ):
        assert not list(private_uses(line)), line


def sources() -> list[Path]:
    found = [ROOT / "ebbtide" / "__main__.py"]
    found += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found += (ROOT / "tests").rglob("*.py")
    away = (SEAM, Path(__file__).parent, *(ROOT / name for name in JUDGED_BY_RAY))
    return [path for path in found if not any(path.is_relative_to(each) for each in away)]


def test_nothing_else_uses_what_is_private_to_ray() -> None:
    found = {
        str(path.relative_to(ROOT)): uses
        for path in sources()
        if (uses := list(private_uses(path.read_text(encoding="utf-8"))))
    }
    assert len(sources()) > 200
    assert not found, (
        f"move these to platform/ray_seam, or add to PUBLIC what is documented: {found}"
    )


def test_ray_is_the_version_that_the_seam_was_written_for() -> None:
    assert ray.__version__ == version("ray") == "2.60.0", (
        "run tests/platform/ray_seam, tests/train/test_elastic.py, tests/tune and tests/serve, "
        "mend the modules that they name, then change this"
    )


def imported() -> Iterator[tuple[str, str, str]]:
    """Module of the seam, module of Ray and the name that is imported from it."""
    for path in sorted(SEAM.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
                assert node.module is not None
                yield from ((path.stem, node.module, alias.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
                yield from ((path.stem, name, "") for name in names if name.startswith("ray"))


@pytest.mark.parametrize(
    ("user", "module", "name"),
    [each for each in imported() if each[0] != "llm"],  # it takes vLLM: see test_llm
    ids=lambda part: part or "-",
)
def test_what_is_imported_exists(user: str, module: str, name: str) -> None:
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        pytest.fail(f"platform/ray_seam/{user}.py: Ray has no {module} any more: {error}")
    if name and not hasattr(found, name):
        try:
            importlib.import_module(f"{module}.{name}")
        except ImportError:
            pytest.fail(f"platform/ray_seam/{user}.py: {module} has no {name} any more")


@pytest.mark.parametrize(
    ("module", "without"),
    [
        *((name, {"ray"}) for name in ("environment", "decisions", "raylets")),
        *(
            (name, {"torch", "ray.train", "ray.tune", "ray.serve"})
            for name in ("control_service", "ray_start", "state", "workers", "output")
        ),
    ],
)
def test_the_light_modules_import_little(module: str, without: set[str]) -> None:
    program = f"import sys, ebbtide.platform.ray_seam.{module} as _; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not without & set(done.stdout.split())
