"""What a pin says when Ray has changed."""

from __future__ import annotations

import pytest

from ebbtide.platform.ray_seam.decisions import Judge
from tests.platform.ray_seam import pins

WHERE = r"; Ray .*: see platform/ray_seam/train\.py"
PINS = pins.Pins("train")
HERE = "tests.platform.ray_seam.pins"


def test_what_is_there_passes() -> None:
    assert PINS.find(f"{HERE}:Pins.find") is pins.Pins.find
    assert pins.Pins("decisions").own("Judge") is Judge
    PINS.takes(f"{HERE}:Pins.find", "path")
    PINS.takes(f"{HERE}:Pins.find", "self", "path", others=False)
    PINS.says(f"{HERE}:Pins.find", "importlib")
    PINS.says(HERE, "class Pins")
    PINS.knows(["a", "b"], ["a"], "letters")


def test_what_is_gone_is_named_with_the_module_that_uses_it() -> None:
    with pytest.raises(AssertionError, match=r"ray\.gone cannot be used: .*" + WHERE):
        PINS.find("ray.gone:f")
    with pytest.raises(AssertionError, match="there is no ray.gone" + WHERE):
        PINS.says("ray.gone", "text")
    with pytest.raises(AssertionError, match=f"{HERE} has no Pins.gone" + WHERE):
        PINS.find(f"{HERE}:Pins.gone")
    with pytest.raises(AssertionError, match=r"takes \['self', 'path'\], not \['url'\]" + WHERE):
        PINS.takes(f"{HERE}:Pins.find", "url")
    with pytest.raises(AssertionError, match="takes .*, not .*" + WHERE):
        PINS.takes(f"{HERE}:Pins.find", "self", others=False)
    with pytest.raises(AssertionError, match="has no 'gone' any more" + WHERE):
        PINS.says(f"{HERE}:Pins.find", "gone")
    with pytest.raises(AssertionError, match="letters has no b, c" + WHERE):
        PINS.knows(["a"], ["c", "b"], "letters")
