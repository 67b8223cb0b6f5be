"""A trained drafter as a folder to publish or to serve."""
