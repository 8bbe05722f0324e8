"""API keys are known by their hashes, and never repeated."""

from __future__ import annotations

import hashlib

import pytest

from ebbtide.platform.config import parse
from ebbtide.platform.errors import ConfigError
from ebbtide.serve.config import ServeConfig
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


@pytest.mark.parametrize("text", [",", " , "])
def test_a_variable_without_keys_does_not_open_the_door(text: str) -> None:
    with pytest.raises(ConfigError, match="unset it"):
        from_variable(text)


def test_a_name_or_key_given_twice_is_refused() -> None:
    own = [ApiKey(name="alice", sha256=hashed(KEY))]
    for text in (f"alice={KEY[::-1]}", f"bob={KEY}"):
        with pytest.raises(ConfigError, match="two keys have the same"):
            from_variable(text, own)
    with pytest.raises(ConfigError, match="two keys have the same name"):
        from_variable(f"bob={KEY},bob={KEY[::-1]}")


@pytest.mark.parametrize("value", [KEY, 123456789012345678, None])
def test_a_key_in_the_place_of_its_hash_is_not_repeated(value: object) -> None:
    text = f"http: {{keys: [{{name: alice, sha256: {value}}}]}}\nname: a\nmodel: {{uri: m}}"
    with pytest.raises(ConfigError, match="64 hexadecimal") as caught:
        parse(text, ServeConfig)
    assert str(value) not in str(caught.value) or value is None


def test_nobody_is_called_anyone() -> None:
    with pytest.raises(ConfigError, match="entry 1"):
        from_variable(f"anyone={KEY}")


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
