"""What a differentially private release costs: participation, mechanisms, epsilon and delta.

Unit: one client. Adjacency: zero-out (that client's updates are replaced by zero; cohort, schedule
and divisor stay). ``noise_multiplier`` is the standard deviation of one i.i.d. Gaussian coordinate
that enters the mechanism, divided by the clip norm, on the scale of the sum.
"""

from accounting.calibrate import calibrate
from accounting.checks import ConfigError
from accounting.error import PrefixError, error
from accounting.guarantee import Guarantee, guarantee
from accounting.mechanisms import (
    BinaryTree,
    BufferedToeplitz,
    Dense,
    Independent,
    Mechanism,
    Toeplitz,
    fingerprint,
    mechanism_from_dict,
)
from accounting.optimize import optimize
from accounting.participation import Participation
from accounting.report import Assumption, PrivacyReport
from accounting.sensitivity import Sensitivity, brute_force

__all__ = [
    "Assumption",
    "BinaryTree",
    "BufferedToeplitz",
    "ConfigError",
    "Dense",
    "Guarantee",
    "Independent",
    "Mechanism",
    "Participation",
    "PrefixError",
    "PrivacyReport",
    "Sensitivity",
    "Toeplitz",
    "brute_force",
    "calibrate",
    "error",
    "fingerprint",
    "guarantee",
    "mechanism_from_dict",
    "optimize",
]
