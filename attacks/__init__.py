"""Attacks: what an adversary gets from an update, with baselines and verdicts.

The attacker sees an ``Observation`` and the model's code, nothing else. A low score is protection
only where the attack is known to work: read the verdict, not the decibels.
"""

from attacks.defences import DefencePoint, defences
from attacks.explain import explain
from attacks.extraction import Exposure, exposure
from attacks.image_audit import ImageAudit, leakage, suite
from attacks.load import change_of_weights, for_model, read_update
from attacks.lower_bounds.bounds import (
    Bound,
    clopper_pearson,
    guesses,
    one_run,
    one_run_gdp,
    pooled_t,
)
from attacks.lower_bounds.canaries import (
    Canaries,
    View,
    coins,
    drifting_view,
    round_covariance,
    view,
    worst_view,
)
from attacks.lower_bounds.loops import CanaryLoop, LoopAudit
from attacks.lower_bounds.planted import canary_clients
from attacks.lower_bounds.replay import Replay, paired
from attacks.lower_bounds.servers import ServerReplay, replay
from attacks.membership_inference import MembershipScore, lira, membership, rmia
from attacks.metrics import psnr, ssim
from attacks.observation import Observation, observe
from attacks.reconstruction.analytic import invert_dense
from attacks.reconstruction.april import april
from attacks.reconstruction.cosine import cosine_tv
from attacks.reconstruction.features import dense_then_invert
from attacks.reconstruction.labels import infer_labels
from attacks.reconstruction.reconstruct import Reconstruction, dlg, reid_rank
from attacks.reconstruction.spear import spear
from attacks.report import LeakageReport, TextReport
from attacks.text.observation import TextObservation, observe_text
from attacks.text.read import ReadText, span_test
from attacks.text_audit import TextAudit, text_leakage
from attacks.update import LocalSteps

__all__ = [
    "Bound",
    "Canaries",
    "CanaryLoop",
    "DefencePoint",
    "Exposure",
    "ImageAudit",
    "LeakageReport",
    "LocalSteps",
    "LoopAudit",
    "MembershipScore",
    "Observation",
    "ReadText",
    "Reconstruction",
    "Replay",
    "ServerReplay",
    "TextAudit",
    "TextObservation",
    "TextReport",
    "View",
    "april",
    "canary_clients",
    "change_of_weights",
    "clopper_pearson",
    "coins",
    "cosine_tv",
    "defences",
    "dense_then_invert",
    "dlg",
    "drifting_view",
    "explain",
    "exposure",
    "for_model",
    "guesses",
    "infer_labels",
    "invert_dense",
    "leakage",
    "lira",
    "membership",
    "observe",
    "observe_text",
    "one_run",
    "one_run_gdp",
    "paired",
    "pooled_t",
    "psnr",
    "read_update",
    "reid_rank",
    "replay",
    "rmia",
    "round_covariance",
    "span_test",
    "spear",
    "ssim",
    "suite",
    "text_leakage",
    "view",
    "worst_view",
]
