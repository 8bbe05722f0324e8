"""Kills its parent when that does not move for a while. Run as a script; standard library alone.

On its standard input the parent writes, twice a second, how many seconds of silence are too many.
The end of the input is the end of the parent. A pause of the whole machine is not held against the
parent: silence is counted in slices of time, and a pause is one slice.
"""

import os
import select
import signal
import sys

SLICE_S = 0.5


def main() -> None:
    parent = os.getppid()
    limit_s, silent_s = float("inf"), 0.0
    while os.getppid() == parent:
        if not select.select([0], [], [], SLICE_S)[0]:
            silent_s += SLICE_S
            if silent_s >= limit_s:
                print(
                    f"{sys.argv[1]} has not moved for {silent_s:g} s: killed",
                    file=sys.stderr,
                    flush=True,
                )
                os.kill(parent, signal.SIGKILL)
                return
            continue
        said = os.read(0, 4096)
        if not said:
            return
        limit_s, silent_s = float(said.split()[-1]), 0.0


if __name__ == "__main__":
    main()
