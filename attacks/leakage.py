"""Leakage by view: what attackers recover from the whole update and from parts of it.

The report separates "protected" from "the attack failed", and puts beside every score the one of
an image that nobody had to attack for. PSNR certifies nothing: it is a lower bound on what leaks,
never to be turned into an epsilon.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accounting import Guarantee, Independent, Participation, checks, guarantee
from accounting.checks import ConfigError
from attacks.audit import Audit, Found
from attacks.metrics import baseline_images, psnr
from attacks.report import Adversary, LeakageReport
from attacks.schedule import summarise, with_union
from attacks.suite import Attack, suite
from attacks.update import LocalSteps, Loss, ready


def leakage(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    views: Mapping[str, Sequence[str]],
    attacks: Mapping[str, Attack] | None = None,
    batch: int = 1,
    loss: Loss = cross_entropy,
    update: Mapping[str, Tensor] | None = None,
    local: LocalSteps | None = None,
    clip: float | None = None,
    noise_multiplier: float = 0.0,
    delta: float = 1e-5,
    adversaries: Sequence[Adversary] | None = None,
    schedule: Sequence[str] = (),
    dataset_mean: Tensor | None = None,
    class_means: Tensor | None = None,
    decoys: tuple[Tensor, Tensor] | None = None,
    restarts: int = 2,
    max_evaluations: int = 500,
    reveal_labels: bool = True,
    seed: int = 0,
    done: MutableMapping[str, Found] | None = None,
    progress: Callable[[str], None] | None = None,
) -> LeakageReport:
    """Attack the update of each batch, once per view and adversary.

    The "server" sees the update after the clip and before noise. With noise there is also the
    "recipient" of the noised sum, who knows every other client's update, as the adversary of
    differential privacy does: to it the sum is one client's update plus noise.

    Args:
        model: with (B, K) logits, in the mode in which clients train; its own weights are those
            that the attacker knows.
        x: (N, C, H, W) in [0, 1].
        y: (N,) labels.
        views: name -> patterns of the parameters that the update shows, as in ``observe``. Only
            these train; the others are frozen, and public.
        attacks: tried in this order until one recovers the image; None is ``suite``.
        batch: images per update; must divide N.
        loss: see ``Observation``.
        update: of the images in ``x`` as one batch, from elsewhere; None computes it. Look at
            ``truth_match``: if the images do not explain it, weights, mode or loss are not its own.
        local: see ``Observation``.
        clip: see ``observe``.
        noise_multiplier: see ``observe``.
        delta: at which the accountant's epsilon of the noised release is printed.
        adversaries: None is the server, and the recipient where there is noise.
        schedule: the view that each round of a training sends; its worst round is reported, and
            the union of its views is audited too.
        dataset_mean: (C, H, W) mean of public data, a baseline; None leaves it out.
        class_means: (K, C, H, W) mean of each class in public data, likewise.
        decoys: (images, labels) that are not in ``x``, for the re-identification rank.
        restarts: of ``suite``.
        max_evaluations: of ``suite``.
        reveal_labels: whether the attacker is told ``y``.
        seed: of the starting points and of the noise; the same for all views.
        done: what was found before, by a key of (adversary, view, batch, clip, noise); filled as
            the audit goes, so that one that was cut off can go on. The caller keeps it to one set
            of the other options.
        progress: called with a line before each attack.

    Raises:
        ConfigError: a pattern that matches no parameter, values out of range.
    """
    batch = checks.count("batch", batch)
    if update is not None and (batch != len(x) or noise_multiplier):
        raise ConfigError("update: is of one batch, and has its own noise; set batch to len(x).")
    if not views:
        raise ConfigError("views={}: name at least one, such as {'full': ['*']}.")
    if len(x) < 1 or len(x) != len(y):
        raise ConfigError(f"x, y: {len(x)} images and {len(y)} labels; must be equally many.")
    if len(x) % batch:
        raise ConfigError(f"batch={batch}: must divide the number of images, {len(x)}.")
    means = None if class_means is None else class_means[y]
    guesses = baseline_images(x, dataset_mean, means, seed=seed)
    scores = {name: psnr(guess, x.double()) for name, guess in guesses.items()}
    audit = Audit(
        model=model,
        x=x.detach(),
        y=y,
        views=with_union(views, schedule),
        attacks=suite(restarts=restarts, max_evaluations=max_evaluations)
        if attacks is None
        else attacks,
        batch=batch,
        options={"loss": loss, "local": local, "clip": clip, "reveal_labels": reveal_labels},
        update=update,
        noise_multiplier=noise_multiplier,
        floor=torch.stack(list(scores.values())).amax(0).tolist(),
        decoys=decoys,
        seed=checks.count("seed", seed, minimum=0),
        done={} if done is None else done,
        progress=progress,
    )
    everyone: tuple[Adversary, ...] = ("server", "recipient") if noise_multiplier else ("server",)
    rows = tuple(row for adversary in adversaries or everyone for row in audit.rows(adversary))
    return LeakageReport(
        rows=rows,
        truth=x.detach().clone(),
        baselines={name: tuple(found.tolist()) for name, found in scores.items()},
        labels_revealed=reveal_labels,
        seed=seed,
        threat=_threat(audit),
        losses=tuple(_loss(model, *audit.images(number), loss) for number in audit.batches),
        baseline_images=guesses,
        bound=_bound(noise_multiplier),
        delta=checks.probability("delta", delta),
        schedule=summarise(rows, schedule) if schedule else None,
        decoys=0 if decoys is None else len(decoys[0]),
    )


def _bound(noise_multiplier: float) -> Guarantee | None:
    """What the accountant says of one noised release, whatever the attacks found."""
    if not noise_multiplier:
        return None
    return guarantee(Independent(1), Participation(1), noise_multiplier=noise_multiplier)


def _loss(model: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> float:
    twin = ready(model, model.training).double()
    with torch.no_grad():
        return float(loss(twin(x.double()), y))


def _threat(audit: Audit) -> dict[str, Any]:
    """What the attacker knows and what was done to the update, as JSON types."""
    local = audit.options["local"]
    clip = audit.options["clip"]
    return {
        "update": "gradient" if local is None else "delta",
        "origin": "computed" if audit.update is None else "given",
        "local": None if local is None else asdict(local),
        "batch": audit.batch,
        "mode": "train" if audit.model.training else "eval",
        "weights": "public",
        "labels": "revealed" if audit.options["reveal_labels"] else "inferred",
        "clip": clip,
        "noise_multiplier": audit.noise_multiplier,
        "noise_std": audit.noise_multiplier * clip if audit.noise_multiplier else 0.0,
        "recipient": "knows every other client's update",
        "attacks": list(audit.attacks),
    }
