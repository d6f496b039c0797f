"""Mechanisms: one file per encoder C."""

from accounting.mechanisms.banded_inverse import BandedInverse
from accounting.mechanisms.buffered_toeplitz import BufferedToeplitz
from accounting.mechanisms.by_name import MechanismChoice, fingerprint, mechanism_from_dict
from accounting.mechanisms.dense import Dense
from accounting.mechanisms.grouped import Grouped
from accounting.mechanisms.independent import Independent
from accounting.mechanisms.mechanism import Footprint, Mechanism, footprint, noise_matrix
from accounting.mechanisms.pruned_tree import PrunedTree
from accounting.mechanisms.scheduled import Scheduled
from accounting.mechanisms.toeplitz import Toeplitz
from accounting.mechanisms.tree import BinaryTree

__all__ = [
    "BandedInverse",
    "BinaryTree",
    "BufferedToeplitz",
    "Dense",
    "Footprint",
    "Grouped",
    "Independent",
    "Mechanism",
    "MechanismChoice",
    "PrunedTree",
    "Scheduled",
    "Toeplitz",
    "fingerprint",
    "footprint",
    "mechanism_from_dict",
    "noise_matrix",
]
