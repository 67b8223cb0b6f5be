"""Put on PYTHONPATH, this makes every process of the pipeline note at its end what it read and imported.

One JSON file a stage in $PIPELINE_NOTES: its words, the params it was handed, the project files it loaded.
"""

import atexit
import json
import os
import sys
from pathlib import Path


def note() -> None:
    params = sys.modules.get("stages.common.params")
    if params is None or "-m" not in sys.orig_argv:
        return
    words = sys.orig_argv[sys.orig_argv.index("-m") + 1 :]
    here = Path.cwd()
    loaded = [Path(file) for module in list(sys.modules.values()) if (file := getattr(module, "__file__", None))]
    modules = [file.relative_to(here).as_posix() for file in loaded if file.is_relative_to(here)]
    facts = {"words": words, "read": sorted(params.READ), "modules": sorted(modules)}
    Path(os.environ["PIPELINE_NOTES"], "-".join(words) + ".json").write_text(json.dumps(facts))


if "PIPELINE_NOTES" in os.environ:
    atexit.register(note)
