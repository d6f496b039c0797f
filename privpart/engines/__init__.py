"""Engines: compute simulated clients, one after another or vectorized, here or in workers."""
