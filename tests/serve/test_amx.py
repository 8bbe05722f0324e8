"""A worker may use AMX tiles from the moment that vLLM has imported its extension."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

_PERMITTED = """
import ctypes
_ARCH_PRCTL, _GET_XCOMP_PERM, _TILE_DATA = 158, 0x1022, 1 << 18
def permitted():
    mask = ctypes.c_uint64()
    assert ctypes.CDLL(None).syscall(_ARCH_PRCTL, _GET_XCOMP_PERM, ctypes.byref(mask)) == 0
    return bool(mask.value & _TILE_DATA)
import torch
before = permitted()
import ebbtide.serve.vllm_worker
print(before, permitted())
"""


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX")
def test_a_worker_has_asked_for_tiles() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PERMITTED], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["False", "True"], "nobody else asks, and the extension does"
