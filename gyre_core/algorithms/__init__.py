"""The algorithms as pure functions: advantages from rewards, losses from log-probabilities."""
