"""Leakage of an arm: what a short audit finds in what its clients send, a lower bound."""

from typing import Any

import torch

import attacks
from privpart.experiment.plan_file import PlanFile
from privpart.experiment.task_data import Reader
from privpart.experiment.training import training
from privpart.select.engine import SelectEngine

_IMAGES = 2  # that are attacked, one per update
_OTHERS = 9  # images of other users, among which each of them is ranked
_EVALUATIONS = 150  # of each search: seconds for a small network
_EXACT = 1e-3  # relative error below which a layer's input counts as read


def leakage_of(plan: PlanFile, read: Reader) -> dict[str, Any]:
    """Return what a short search finds in updates of one image each, as columns of a frontier.

    Each is the update of one image of a user, at the start values, clipped and without noise. Where
    groups of parameters take turns, the one that gives most away counts.

    Args:
        plan: of the arm. Clients that select, or whose examples are not images, are not audited.
        read: reads the plan's task.

    Returns:
        ``leakage``: the verdict. ``leakage_psnr`` and ``leakage_baseline``: dB of the
        reconstruction, and of the best image that needs no attack, medians over the images.
        ``leakage_rank``: the worst place of a true image among it and those of other users, ordered
        by how well the update of each matches. ``inputs_read``: layers whose input the update is.
    """
    setup = training(plan, report=lambda _: None, read=read)
    columns = ("psnr", "baseline", "rank")
    empty = {"leakage": "not audited", **{f"leakage_{name}": None for name in columns}}
    if isinstance(setup.trainer, SelectEngine):
        return {**empty, "inputs_read": ""}
    first = setup.clients.ids[: _IMAGES + _OTHERS]
    batches = [setup.clients.examples(client) for client in first]
    if not all(isinstance(b, tuple) and len(b) == 2 and b[0].dim() == 4 for b in batches):
        return {**empty, "inputs_read": ""}
    x, y = (torch.cat([batch[part][:1] for batch in batches]) for part in (0, 1))
    report = attacks.leakage(
        setup.model.module,
        x[:_IMAGES],
        y[:_IMAGES],
        views={f"group {i}": names for i, names in enumerate(setup.model.groups)},
        attacks=attacks.suite(
            restarts=1, max_evaluations=_EVALUATIONS, newton_steps=0, steps=_EVALUATIONS
        ),
        clip=plan.privacy.clip_norm,
        decoys=(x[_IMAGES:], y[_IMAGES:]) if len(x) > _IMAGES else None,
    )
    worst = next(row for row in report.rows if row.verdict == report.verdict)
    summary = worst.to_dict()
    read_from = {n for row in report.rows for n, e in row.feature_error.items() if e <= _EXACT}
    return {
        "leakage": worst.verdict,
        "leakage_psnr": summary["psnr_median"],
        "leakage_baseline": summary["baseline_median"],
        "leakage_rank": f"{max(worst.ranks)} of {len(x) - _IMAGES + 1}" if worst.ranks else None,
        "inputs_read": " ".join(sorted(read_from)),
    }
