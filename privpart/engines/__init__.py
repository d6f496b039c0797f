"""Ways to compute many simulated clients: one by one, together, from stored features, in workers."""
