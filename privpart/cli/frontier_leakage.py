"""Leakage of an arm: what a short audit finds in the update of one image, a lower bound for it."""

from typing import Any

import torch

import attacks
from privpart.select.engine import SelectEngine
from privpart.training.plan_file import PlanFile
from privpart.training.task_data import Reader
from privpart.training.training import training

_IMAGES = 2  # that are attacked, one per update
_OTHERS = 9  # images of other users with its label, among which each of them is ranked
_USERS = 1000  # among whom the others are sought
_EVALUATIONS = 150  # of each search: seconds for a small network
_EXACT = 1e-3  # relative error below which a layer's input counts as read
_COLUMNS = ("leakage_psnr", "leakage_baseline", "leakage_rank")
NOT_AUDITED = {"leakage": "not audited", **dict.fromkeys(_COLUMNS), "inputs_read": ""}


def leakage_of(plan: PlanFile, read: Reader) -> dict[str, Any]:
    """Return what a short search finds in updates of one image each, as columns of a frontier.

    Each is the update of one image of a user, at the start values, clipped and without noise. Where
    groups of parameters take turns, the one that gives most away counts.

    Clients that select, that have another loss than cross-entropy, or whose examples are not images
    with values in [0, 1] and a label each, are not audited.

    Returns:
        ``leakage``: the verdict. ``leakage_psnr`` and ``leakage_baseline``: dB of the
        reconstruction, and of the best image that needs no attack, medians over the images.
        ``leakage_rank``: the worst place of a true image among it and those of other users with
        the same label, ordered by how well the update of each matches; of other labels, the label
        alone would tell. ``inputs_read``: layers whose input the update is.
    """
    setup = training(plan, report=lambda _: None, read=read)
    if isinstance(setup.trainer, SelectEngine) or plan.client.loss != "cross_entropy":
        return dict(NOT_AUDITED)
    batches = [setup.clients.examples(client) for client in setup.clients.ids[:_USERS]]
    if not all(_is_images(batch) for batch in batches):
        return dict(NOT_AUDITED)
    x, y = (torch.cat([batch[part][:1] for batch in batches]) for part in (0, 1))
    others = x[_IMAGES : _IMAGES + _OTHERS]
    module = setup.model.module
    report = attacks.leakage(
        module,
        x[:_IMAGES],
        y[:_IMAGES],
        views={f"group {i}": names for i, names in enumerate(setup.model.groups)},
        attacks=attacks.suite(
            restarts=1, max_evaluations=_EVALUATIONS, newton_steps=0, steps=_EVALUATIONS
        ),
        clip=plan.privacy.clip_norm,
        dataset_mean=others.double().mean(0) if len(others) else None,
    )
    worst = next(row for row in report.rows if row.verdict == report.verdict)
    ranks, clip = [], plan.privacy.clip_norm
    for i in range(len(x[:_IMAGES])):
        alike = [j for j in range(_IMAGES, len(y)) if y[j] == y[i]][:_OTHERS]
        true_x, true_y = x[i : i + 1], y[i : i + 1]
        update = attacks.observe(module, true_x, true_y, visible=worst.patterns, clip=clip)
        rank = attacks.reid_rank(module, update, true_x, x[alike], y[[i, *alike]])
        ranks += [(rank, len(alike) + 1)] if alike else []
    summary = worst.to_dict()
    read_from = {n for row in report.rows for n, e in row.feature_error.items() if e <= _EXACT}
    return {
        "leakage": worst.verdict,
        "leakage_psnr": summary["psnr_median"],
        "leakage_baseline": summary["baseline_median"],
        "leakage_rank": "{} of {}".format(*max(ranks)) if ranks else None,
        "inputs_read": " ".join(sorted(read_from)),
    }


def _is_images(batch: object) -> bool:
    """Return whether examples are images with values in [0, 1] and a label each."""
    if not isinstance(batch, tuple) or len(batch) != 2:
        return False
    x, y = batch
    pixels = x.dim() == 4 and x.is_floating_point()
    return bool(pixels and y.dim() == 1 and ((x >= 0) & (x <= 1)).all())
