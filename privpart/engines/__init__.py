"""Engines: many clients one by one, together, from stored features, in worker processes."""
