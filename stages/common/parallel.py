"""A stage in several processes of this machine."""

import os
import subprocess
import sys
from pathlib import Path

from stages.common import entry


def launch(run: entry.Run, processes: int) -> bool:
    """Start this stage again under torchrun with so many processes; True once they are done, and nothing is left to do.

    False where this process is to do the work: one is enough, or it is one of several already (torchrun or srun by
    hand). SystemExit with their status if they fail.
    """
    if processes == 1 or "WORLD_SIZE" in os.environ:
        return False
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    module = f"stages.{Path(sys.argv[0]).parent.name}"
    done = subprocess.run([*torchrun, "-m", module, run.profile, *run.words.values()], check=False)
    if done.returncode:
        raise SystemExit(done.returncode)
    return True
