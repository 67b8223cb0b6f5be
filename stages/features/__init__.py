"""The verifier's hidden states at every token of the trajectories: what EAGLE-like drafters learn from."""
