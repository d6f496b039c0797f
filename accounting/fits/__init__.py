"""Fits: what ``accounting.optimize`` chooses from, one file per kind of encoder."""
