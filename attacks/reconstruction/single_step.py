"""Single steps: the change of the weights after one step tells the gradient, in closed form.

The first step of Adam moves a weight by r = |g| / (|g| + e) of the learning rate, with e = 1e-8, so
|g| = e r / (1 - r). What limits it is how the weights are rounded: where 1 - r drowns in that, only
the sign of g and a lower bound are left. With weights of 0.1 and a rate of 1e-3 the bound is 1e4 in
float64, which no gradient reaches, and 3e-5 in float32.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from attacks.observation import Observation
from attacks.transforms import Declared, Transform
from attacks.transforms.transform import Update
from attacks.update import EPSILON, norm

_SURE = 30.0  # how far above its rounding error 1 - r must be
_WHOLE = 1 - 1e-6  # of the clip norm; an update as long as that has lost its scale


@dataclass(frozen=True, eq=False)
class KnownTo(Transform):
    """A gradient of which each entry is known up to a bound, and beyond it by its sign."""

    bounds: Mapping[str, Tensor]
    decay: Mapping[str, Tensor]  # what weight decay adds to the gradient before the step
    loses: ClassVar[bool] = True

    def __str__(self) -> str:
        return "gradient of a single step"

    def __call__(self, update: Update) -> dict[str, Tensor]:
        """Return the gradient with each entry cut at its bound."""
        known = {}
        for name, value in update.items():
            bound, decay = (part[name].to(value.dtype) for part in (self.bounds, self.decay))
            known[name] = (value + decay).clamp(-bound, bound) - decay
        return known


def before_step(observed: Observation) -> Observation:
    """Return the observation of the gradient that a client's single step of Adam or AdamW is of.

    Unchanged where the client did something else, or where noise, a clip or a transform changed how
    long each entry is.
    """
    local, clip = observed.local, observed.clip
    changed = observed.noise_std > 0 or bool(observed.transform.steps)
    cut = clip is not None and norm(observed.update) >= _WHOLE * clip
    if local is None or local.optimizer == "sgd" or local.steps > 1 or changed or cut:
        return observed
    (rate,) = local.rates
    single = all(torch.equal(v.float().double(), v) for v in observed.update.values())
    rounding = torch.finfo(torch.float32 if single else torch.float64).eps
    gradient, bounds, decays = {}, {}, {}
    for name, moved in observed.update.items():
        decay = local.weight_decay * observed.state[name]
        beside = local.optimizer == "adamw"
        step = -moved / rate - (decay if beside else 0.0)
        error = rounding * (1 + observed.state[name].abs() / rate)
        bounds[name] = EPSILON * (1 / (_SURE * error) - 1).clamp(min=0)
        size = EPSILON * step.abs() / (1 - step.abs()).clamp(min=error)
        decays[name] = torch.zeros_like(decay) if beside else decay
        gradient[name] = step.sign() * torch.minimum(size, bounds[name]) - decays[name]
    known = Declared((KnownTo(bounds, decays),))
    return replace(observed, update=gradient, local=None, clip=None, transform=known)
