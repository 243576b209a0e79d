"""Check, get the data, and train: what run.sh starts.

    python -m speedrun.launch SCRIPT [flags of the script]

One process trains in this one, which has loaded torch for the checks; torchrun starts several.
"""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from speedrun import needs
from speedrun.process import available_cores

with needs.packages():
    import train_gpt
    from speedrun import check


def torchrun(processes: int) -> list[str]:
    """Return what starts so many processes of a script here, and set what they should find in their environment."""
    # torchrun would set 1 and say so at length; on a CPU train_gpt.py shares out the threads of its preset
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Every process would compile in as many workers as there are cores, up to 32: let them share the cores
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(-(-available_cores() // processes), 32)))
    # Without --local-addr the ranks look for this machine by its name, for ten minutes where that does not resolve
    flags = f"--standalone --local-addr localhost --nproc_per_node {processes}"
    flags += " --signals-to-handle SIGTERM,SIGINT,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU"
    return ["-m", "torch.distributed.run", *flags.split()]


def main(argv: Sequence[str]) -> int:
    """Return the exit code, unless other processes take the place of this one."""
    script, *flags = argv
    code, (processes, *own) = check.prepare(flags, check.Report(is_full=False))
    if code:
        return code
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a console that goes away does not end a training
    flags = [*own, *flags]
    launcher = torchrun(int(processes)) if processes != "1" else []
    if launcher or Path(script).resolve() != Path(train_gpt.__file__).resolve():
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *launcher, script, *flags])
    return train_gpt.program(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
