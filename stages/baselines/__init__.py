"""The drafters SpecDiff-2 is compared with, trained on the same trajectories (METHOD.md; the paper's rivals)."""
