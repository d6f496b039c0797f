"""Example-level DP-FTRL for an ordinary PyTorch loop, on Opacus's per-example gradients."""

from privpart.example_level.engine import FTRLEngine

__all__ = ["FTRLEngine"]
