"""Mechanisms: one file per encoder C."""

from accounting.mechanisms.buffered_toeplitz import BufferedToeplitz
from accounting.mechanisms.dense import Dense
from accounting.mechanisms.independent import Independent
from accounting.mechanisms.mechanism import Mechanism
from accounting.mechanisms.serialized import fingerprint, mechanism_from_dict
from accounting.mechanisms.toeplitz import Toeplitz
from accounting.mechanisms.tree import BinaryTree

__all__ = [
    "BinaryTree",
    "BufferedToeplitz",
    "Dense",
    "Independent",
    "Mechanism",
    "Toeplitz",
    "fingerprint",
    "mechanism_from_dict",
]
