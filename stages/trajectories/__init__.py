"""The verifier's own continuations of the training prompts: what adapt and distill learn from."""
