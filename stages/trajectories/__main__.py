"""python -m stages.trajectories <profile>: the verifier continues every prompt of the training corpus.

Reads   data/<profile>/prompts/corpus.parquet, data/<profile>/models/verifier/
Writes  data/<profile>/trajectories.parquet (one row a prompt, in the corpus's order), data/<profile>/contexts/
        (the verifier's keys and values of `keep_layers`, for drafters that read them)
Params  seed, <profile>.device, <profile>.trajectories

A killed run goes on where it stopped, with as many processes as there are then: finished shards wait in data/scratch/
until the output is in place.
"""

from stages.common import entry, parallel
from stages.common.params import load
from stages.trajectories.params import Trajectories
from stages.trajectories.write import write_trajectories


def main(run: entry.Run) -> None:
    params = load(Trajectories, run.profile, "trajectories")
    if parallel.launch(run, params.processes):
        return
    write_trajectories(run.profile, params, seed=load(int, "seed"), device=run.device())


if __name__ == "__main__":
    entry.run(main)
