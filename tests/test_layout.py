"""What keeps the four folders importable: links, no packages, no names of the standard library."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("platform", "train", "serve", "tune")


def test_the_standard_librarys_platform_is_not_shadowed() -> None:
    assert platform.system()


@pytest.mark.parametrize("room", ROOMS)
def test_room_is_reached_through_a_link_and_is_no_package_of_its_own(room: str) -> None:
    assert (ROOT / "ebbtide" / room).is_symlink()
    assert (ROOT / "ebbtide" / room).resolve() == ROOT / room
    assert not (ROOT / room / "__init__.py").exists()


@pytest.mark.parametrize("room", ROOMS)
def test_no_module_has_a_name_of_the_standard_library(room: str) -> None:
    names = {path.stem for path in (ROOT / room).glob("*.py")}
    assert not names & set(sys.stdlib_module_names)


@pytest.mark.parametrize("room", ROOMS)
def test_no_module_is_longer_than_600_lines(room: str) -> None:
    lengths = {
        path.name: len(path.read_text().splitlines()) for path in (ROOT / room).rglob("*.py")
    }
    assert not {name: lines for name, lines in lengths.items() if lines > 600}
