"""Accounting: what a differentially private release costs, as participation, epsilon and delta.

Unit: one client. Adjacency: zero-out (that client's updates are replaced by zero; cohort, schedule
and divisor stay). ``noise_multiplier`` is the standard deviation of one i.i.d. Gaussian coordinate
that enters the mechanism, divided by the clip norm, on the scale of the sum.
"""

from accounting.bounded import (
    ReplacedGuarantee,
    TruncatedGuarantee,
    TruncatedPoissonSampling,
    WithoutReplacementSampling,
    WithReplacementSampling,
)
from accounting.calibrate import calibrate
from accounting.checks import ConfigError
from accounting.cohorts import Estimate, cohorts, participation_of, sampled_guarantee
from accounting.composed import ComposedGuarantee, StatedGuarantee
from accounting.error import PrefixError, error
from accounting.events import composed_events
from accounting.guarantee import CrossCheck, Guarantee, guarantee
from accounting.mechanisms import (
    BandedInverse,
    BinaryTree,
    BufferedToeplitz,
    Dense,
    Footprint,
    Grouped,
    Independent,
    Mechanism,
    PrunedTree,
    Scheduled,
    Toeplitz,
    fingerprint,
    footprint,
    mechanism_from_dict,
)
from accounting.monte_carlo import BMinSep, EstimatedGuarantee
from accounting.optimize import optimize
from accounting.participation import FixedOrder, Participation
from accounting.random_allocation import AllocatedGuarantee, BallsInBins
from accounting.realised import Realised
from accounting.report import Assumption, PrivacyReport
from accounting.scheduled_steps import ScheduledGuarantee, ScheduledPoissonSampling
from accounting.selection import (
    BinomialRuns,
    NegativeBinomialRuns,
    PoissonRuns,
    SelectedGuarantee,
    most_mu,
)
from accounting.sensitivity import Sensitivity, brute_force
from accounting.subsampled import PoissonSampling, SampledGuarantee
from accounting.user_level import ExampleSampling, UserGuarantee
from accounting.workload import Workload

__all__ = [
    "AllocatedGuarantee",
    "Assumption",
    "BMinSep",
    "BallsInBins",
    "BandedInverse",
    "BinaryTree",
    "BinomialRuns",
    "BufferedToeplitz",
    "ComposedGuarantee",
    "ConfigError",
    "CrossCheck",
    "Dense",
    "Estimate",
    "EstimatedGuarantee",
    "ExampleSampling",
    "FixedOrder",
    "Footprint",
    "Grouped",
    "Guarantee",
    "Independent",
    "Mechanism",
    "NegativeBinomialRuns",
    "Participation",
    "PoissonRuns",
    "PoissonSampling",
    "PrefixError",
    "PrivacyReport",
    "PrunedTree",
    "Realised",
    "ReplacedGuarantee",
    "SampledGuarantee",
    "Scheduled",
    "ScheduledGuarantee",
    "ScheduledPoissonSampling",
    "SelectedGuarantee",
    "Sensitivity",
    "StatedGuarantee",
    "Toeplitz",
    "TruncatedGuarantee",
    "TruncatedPoissonSampling",
    "UserGuarantee",
    "WithReplacementSampling",
    "WithoutReplacementSampling",
    "Workload",
    "brute_force",
    "calibrate",
    "cohorts",
    "composed_events",
    "error",
    "fingerprint",
    "footprint",
    "guarantee",
    "mechanism_from_dict",
    "most_mu",
    "optimize",
    "participation_of",
    "sampled_guarantee",
]
