"""Hypothesis: the same examples on every machine, and no deadline on a shared one."""

from hypothesis import settings

settings.register_profile("ci", derandomize=True, database=None, deadline=None, max_examples=100)
settings.load_profile("ci")
