"""Plan: what a profile takes, before any GPU hour is spent. Not a stage of the graph.

    python -m stages.plan --profile qwen72b     (or: python -m stages.plan qwen72b)

Reads params.yaml and facts.yaml beside this file, and the config.json of models that are there already; runs nothing.
For every stage: GPU memory by part, disk, tokens, floating-point operations, hours on A100, H100 and H200; what does
not fit on the profile's GPUs, and the setting to change; the command that selects the profile.
"""

import sys
from collections.abc import Sequence

from stages.common import entry
from stages.plan.overview import overview
from stages.plan.settings import read
from stages.plan.table import text


def main(run: entry.Run) -> None:
    profile = read(run.profile)
    print(text(profile, overview(profile)))


def words(argv: Sequence[str]) -> list[str]:
    """The command line without `--profile`."""
    return [word.removeprefix("--profile=") for word in argv if word != "--profile"]


if __name__ == "__main__":
    entry.run(main, compute=False, argv=words(sys.argv[1:]))
