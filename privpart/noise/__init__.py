"""The server's noise: where draws come from, and how they are correlated."""
