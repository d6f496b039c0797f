"""What an adversary gets from an update: reconstructions, with baselines and verdicts beside them.

The attacker sees an ``Observation`` and the model's code, nothing else. A low score is protection
only where the attack is known to work: read the verdict, not the decibels.
"""

from attacks.analytic import invert_dense
from attacks.leakage import leakage
from attacks.metrics import baselines, psnr
from attacks.observation import Observation, observe
from attacks.reconstruct import Reconstruction, dlg
from attacks.report import LeakageReport, LeakageRow

__all__ = [
    "LeakageReport",
    "LeakageRow",
    "Observation",
    "Reconstruction",
    "baselines",
    "dlg",
    "invert_dense",
    "leakage",
    "observe",
    "psnr",
]
