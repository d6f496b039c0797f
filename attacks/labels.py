"""Labels: given, or read off the update."""

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accounting.checks import ConfigError
from attacks.observation import Observation


def known_labels(model: nn.Module, observation: Observation) -> Tensor:
    """Return the labels that were revealed, else the one that the last dense bias shows.

    For one image under cross-entropy the gradient of the logits, hence of the bias of the last
    dense layer, is softmax - onehot: its one negative entry is the label (Zhao, Mopuri and Bilen
    2020, iDLG). Noise may turn the sign of others, so the least entry is taken.

    Raises:
        ConfigError: the labels are hidden and this rule does not apply.
    """
    if observation.labels is not None:
        return observation.labels
    if observation.shape[0] != 1 or observation.loss is not cross_entropy:
        raise ConfigError(
            "labels=None: only a batch of one under cross-entropy shows its label; "
            "observe with reveal_labels=True."
        )
    bias = f"{_last_dense(model)}.bias"
    if bias not in observation.update:
        raise ConfigError(
            f"labels=None: they can be read only off {bias!r}, which is not in view; "
            "show it, or observe with reveal_labels=True."
        )
    return observation.update[bias].argmin().reshape(1)


def _last_dense(model: nn.Module) -> str:
    """Name of the dense layer that was registered last; by convention it makes the logits."""
    names: list[str] = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear)
    ]
    if not names:
        raise ConfigError("labels=None: the model has no nn.Linear; pass reveal_labels=True.")
    return names[-1]
