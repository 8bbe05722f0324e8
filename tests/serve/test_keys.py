"""API keys are known by their hashes, and never repeated."""

from __future__ import annotations

import hashlib

import pytest

from ebbtide.platform.errors import ConfigError
from ebbtide.serve.keys import ApiKey, from_variable, hashed, identify

KEY = "0123456789abcdef"


def test_the_hash_is_that_of_sha256sum() -> None:
    assert hashed(KEY) == hashlib.sha256(KEY.encode()).hexdigest()


def test_keys_from_the_environment() -> None:
    found = from_variable(f"alice={KEY}, bob={KEY[::-1]}=")
    assert [(key.name, key.sha256) for key in found] == [
        ("alice", hashed(KEY)),
        ("bob", hashed(KEY[::-1] + "=")),
    ]
    assert from_variable("") == []


@pytest.mark.parametrize("text", [KEY, f"={KEY}", "alice=short", f"a b={KEY}"])
def test_a_bad_entry_is_named_by_its_place_alone(text: str) -> None:
    with pytest.raises(ConfigError, match="entry 2") as caught:
        from_variable(f"carol={KEY},{text}")
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (f"Bearer {KEY}", "alice"),
        (f"bearer {KEY} ", "alice"),
        (KEY, None),
        (f"Basic {KEY}", None),
        ("Bearer ", None),
        (f"Bearer {KEY}x", None),
        (f"Bearer {hashed(KEY)}", None),
        (None, None),
    ],
)
def test_who_asks(header: str | None, name: str | None) -> None:
    keys = [ApiKey(name="alice", sha256=hashed(KEY)), ApiKey(name="bob", sha256=hashed("b" * 16))]
    found = identify(header, keys)
    assert (found.name if found else None) == name
