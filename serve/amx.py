"""The right to use a CPU's AMX tiles, for which a process has to ask Linux once.

vLLM's attention for bf16 uses them without having asked, and the kernel ends the worker (SIGILL);
a matrix product of PyTorch asks. Models whose layers are all small get none before attention. Seen
in vLLM 0.29.
"""

from __future__ import annotations


def ask() -> None:
    """Ask for this process, all of its threads included; without AMX nothing comes of it."""
    import torch

    torch.ones(1, 32, dtype=torch.bfloat16) @ torch.ones(32, 32, dtype=torch.bfloat16)
