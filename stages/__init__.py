"""The stages of the pipeline, each run as `python -m stages.<name>` (stages/common/entry.py)."""

import gc

COLLECT = gc.get_threshold()  # as a stage runs
gc.set_threshold(100_000)  # until then: importing torch and transformers makes a million objects and drops few
