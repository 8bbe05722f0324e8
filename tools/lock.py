"""Write ``requirements/cpu.txt``: every package of ``ebbtide[cpu,dev]`` at one version.

Run by ``make lock``. pip resolves (so its configured sources count); the packages in ``LEFT_OUT``
are dropped because nothing here needs them and, built for CUDA, they break ``import transformers``
beside a CPU build of torch (nixl-cu12: NIXL again for CUDA 12). The file is installed with
``--no-deps``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "triton", "nvidia-", "cuda-", "nixl-cu12")
ROOT = Path(__file__).parents[1]
HEADER = """\
# Written by `make lock`; do not edit. Every package of ebbtide[cpu,dev], for a machine without GPU.
# Install with --no-deps: packages built for CUDA that break `import transformers` are left out.
# torch is pinned in torch.txt, as its CPU build may come from an index of its own.
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--report", str(report)]
        torch = (ROOT / "requirements/torch.txt").read_text().split()[-1]
        subprocess.run([*command, f"{ROOT}[cpu,dev]", torch], check=True)
        found = json.loads(report.read_text())["install"]
    pins = {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in found}
    del pins["ebbtide"], pins["torch"]
    lines = [
        f"{name}=={version}"
        for name, version in sorted(pins.items())
        if not name.startswith(LEFT_OUT)
    ]
    (ROOT / "requirements/cpu.txt").write_text(HEADER + "\n".join(lines) + "\n")
    print(f"requirements/cpu.txt: {len(lines)} packages")


if __name__ == "__main__":
    main()
