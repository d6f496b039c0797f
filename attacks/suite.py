"""Suite: the attacks that an audit tries, cheapest first."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from attacks.observation import Observation
from attacks.reconstruction.analytic import invert_first_dense
from attacks.reconstruction.april import april
from attacks.reconstruction.batch_statistics import sent_statistics
from attacks.reconstruction.cosine import MOST_GUESSES, cosine_tv
from attacks.reconstruction.features import dense_then_invert
from attacks.reconstruction.labels import label_candidates
from attacks.reconstruction.reconstruct import FALLING, Reconstruction, dlg
from attacks.reconstruction.spear import spear

_STATISTICS = 1.0  # weight of the batch statistics beside the residual
_DRAWS = 30_000  # of spear: seconds
Attack = Callable[[nn.Module, Observation, int], Reconstruction | None]


def suite(
    *,
    restarts: int = 2,
    max_evaluations: int = 500,
    newton_steps: int = 10,
    steps: int = 1000,
    tv: float = 1e-2,
) -> dict[str, Attack]:
    """Return every attack by name; an attack returns None where it does not apply.

    Args:
        restarts: of ``dlg`` and ``dense_then_invert``; ``cosine_tv`` takes twice as many.
        max_evaluations: of each search of those two.
        newton_steps: of each of their Gauss-Newton searches.
        steps: of ``cosine_tv``; 0 leaves it out.
        tv: weight of the prior in "dlg + tv", and of the one between ten times and a tenth of it
            in "dlg + falling tv"; 0 leaves both out. The restarts of ``cosine_tv`` take 200
            times it and twice it in turn, in units of the distance at the start.
    """
    searches = {
        "restarts": restarts,
        "max_evaluations": max_evaluations,
        "newton_steps": newton_steps,
    }
    attacks: dict[str, Attack] = {
        "invert_dense": lambda model, seen, _: invert_first_dense(model, seen),
        "april": lambda model, seen, _: april(model, seen),
        "spear": partial(_seeded, spear, {"draws": _DRAWS}),
        "dense_then_invert": partial(_seeded, dense_then_invert, searches),
        "dlg": partial(_seeded, dlg, searches),
    }
    attacks["dlg + statistics"] = partial(_if_sent, searches | {"newton_steps": 0})
    if steps:
        cosine = {"restarts": 2 * restarts, "steps": steps, "tv": (200 * tv, 2 * tv)}
        attacks["cosine_tv"] = partial(_if_labelled, cosine_tv, cosine)
    if tv:
        once = searches | {"restarts": 1}
        attacks["dlg + tv"] = partial(_seeded, dlg, once | {"tv": tv})
        falling = {"tv": tuple(10 * tv * weight / FALLING[0] for weight in FALLING)}
        attacks["dlg + falling tv"] = partial(_seeded, dlg, once | falling)
    return attacks


def _seeded(
    attack: Callable[..., Reconstruction | None],
    options: Mapping[str, Any],
    model: nn.Module,
    seen: Observation,
    seed: int,
) -> Reconstruction | None:
    return attack(model, seen, seed=seed, **options)


def _if_sent(
    options: Mapping[str, float], model: nn.Module, seen: Observation, seed: int
) -> Reconstruction | None:
    """Return None where the client sent no statistics of its batch."""
    if not sent_statistics(model, seen):
        return None
    return _seeded(dlg, {**options, "statistics": _STATISTICS}, model, seen, seed)


def _if_labelled(
    attack: Callable[..., Reconstruction | None],
    options: Mapping[str, Any],
    model: nn.Module,
    seen: Observation,
    seed: int,
) -> Reconstruction | None:
    """Return None where labels would have to be guessed, which this attack cannot do."""
    if len(label_candidates(model, seen)) > MOST_GUESSES:
        return None
    return _seeded(attack, options, model, seen, seed)
