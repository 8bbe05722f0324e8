"""Known beginnings of prompts, and tokens guessed from characters."""

from __future__ import annotations

import pytest

from ebbtide.serve.prefixes import BLOCK, Prefixes, Ratio, keys, units


def test_the_known_beginning_is_found_in_blocks() -> None:
    seen = Prefixes()
    shared = "a" * (2 * BLOCK)
    seen.add(keys(shared + "b" * BLOCK))
    assert seen.known(keys(shared + "c" * BLOCK)) == 2 * BLOCK
    assert seen.known(keys(shared + "b" * BLOCK + "d")) == 3 * BLOCK
    assert seen.known(keys("x" + shared)) == 0
    assert seen.known(keys("short")) == 0
    assert seen.known(keys("b" * BLOCK)) == 0  # the same block elsewhere is another


def test_the_oldest_are_forgotten() -> None:
    seen = Prefixes(capacity=2)
    first, second = keys("a" * BLOCK), keys("b" * 2 * BLOCK)
    seen.add(first)
    seen.add(second)
    assert (seen.known(first), seen.known(second)) == (0, 2 * BLOCK)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"prompt": "the"}, "the"),
        ({"prompt": [1, 2]}, [1, 2]),
        ({"prompt": ["a", "b"]}, '["a", "b"]'),
        ({"prompt": None}, ""),
        ({"prompt": 3}, ""),
        ({"messages": [{"role": "user", "content": "é"}]}, '[{"role": "user", "content": "é"}]'),
    ],
)
def test_what_a_prompt_is_made_of(request_: dict[str, object], expected: object) -> None:
    assert units(request_) == expected


def test_the_ratio_is_learned_from_what_workers_count() -> None:
    ratio = Ratio()
    assert ratio.tokens("x" * 400, 400) == 100
    assert ratio.tokens([1] * 400, 400) == 400
    ratio.learn("x" * 100, 50)
    assert ratio.tokens("x" * 400, 400) == 200
    ratio.learn("x" * 100, 100)
    assert ratio.tokens("x" * 400, 400) == 220
