"""Mechanisms: one file per encoder C."""

from accounting.mechanisms.independent import Independent
from accounting.mechanisms.mechanism import Mechanism
from accounting.mechanisms.tree import BinaryTree

__all__ = ["BinaryTree", "Independent", "Mechanism"]
