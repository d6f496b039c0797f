"""Experiments: a training as people write it, and the one runner of it."""
