"""Batch statistics: what a client's running statistics say about its batch.

A client that sends its buffers sends more than an update. In training mode batch normalisation
moves its running mean and variance by a known share towards those of the batch, so that

    mean of the batch = before + (after - before) / momentum

per channel and layer. After one step these are the statistics of the images themselves; gradient
inversion uses them as a prior (Yin et al. 2021). After several steps they are of several weights.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from accounting.checks import ConfigError
from attacks.observation import Observation
from attacks.update import State, as_double, ready, recording

_KINDS = ("running_mean", "running_var")
Statistics = dict[str, Tensor]  # of a batch, by the name of the buffer that they move


def sent_statistics(model: nn.Module, observation: Observation) -> Statistics:
    """Return the mean and the unbiased variance per channel of the client's batch.

    Returns:
        by the name of the buffer; empty where none was sent, where the client did not train in
        training mode, or where it took several steps.
    """
    single = observation.local is None or observation.local.steps == 1
    if not observation.training or not single:
        return {}
    statistics = {}
    for name, share in _running(model, observation.state):
        if name in observation.buffers and share > 0:
            before = observation.state[name]
            statistics[name] = before + (observation.buffers[name] - before) / share
    return statistics


def statistics_gap(model: nn.Module, observation: Observation) -> Callable[[Tensor], Tensor] | None:
    """Return x (B, C, H, W) -> relative squared gap of its statistics s, or None if none is known.

    It is the mean of ||s(x) - s||^2 / ||s||^2: every layer counts alike.
    """
    wanted = sent_statistics(model, observation)
    if not wanted:
        return None
    reach = batch_statistics(model, observation.state)

    def gap(x: Tensor) -> Tensor:
        statistics = reach(x)
        parts = [
            (statistics[name] - value).square().sum() / value.square().sum().clamp(min=1e-30)
            for name, value in wanted.items()
        ]
        return torch.stack(parts).mean()

    return gap


def batch_statistics(model: nn.Module, state: State) -> Callable[[Tensor], Statistics]:
    """Return x (B, C, H, W) -> the statistics of its batch at the weights ``state``."""
    twin = ready(model, training=True)

    def reach(x: Tensor) -> Statistics:
        with recording(twin, nn.modules.batchnorm._BatchNorm) as calls:
            functional_call(twin, dict(state), (x,))
        statistics: Statistics = {}
        for call in calls:
            axes = [0, *range(2, call.inputs.ndim)]
            moments = call.inputs.mean(axes), call.inputs.var(axes)
            names = (f"{call.name}.{kind}".lstrip(".") for kind in _KINDS)
            statistics |= dict(zip(names, moments, strict=True))
        return statistics

    return reach


def with_buffers(model: nn.Module, observation: Observation, x: Tensor) -> Observation:
    """Return ``observation`` with the running statistics that the batch ``x`` leaves."""
    if not observation.training:
        raise ConfigError(
            "send_buffers: in eval mode a client's buffers do not move; leave it out."
        )
    if observation.local is not None and observation.local.steps > 1:
        raise ConfigError(
            f"send_buffers: after {observation.local.steps} local steps the buffers are not those "
            "of one batch; audit a gradient or one step, or leave it out."
        )
    state = observation.state
    with torch.no_grad():
        statistics = batch_statistics(model, state)(as_double(x))
    after = {
        name: state[name] + share * (statistics[name] - state[name])
        for name, share in _running(model, state)
    }
    return replace(observation, buffers=after)


def buffers_after(
    model: nn.Module, update: Mapping[str, Tensor], changes: bool
) -> dict[str, Tensor]:
    """Return the running statistics among the tensors that a client sent, as after its training.

    ``changes`` says whether the tensors are after - before. Their shapes are the model's.
    """
    running = {name: value for name, value in model.named_buffers() if name.endswith(_KINDS)}
    after = {}
    for name, before in running.items():
        if name in update:
            start = as_double(before) if changes else 0.0
            after[name] = as_double(update[name]) + start
    return after


def _running(model: nn.Module, state: State) -> Iterator[tuple[str, float]]:
    """Yield the name of each running statistic, and the share by which one batch moves it.

    Without a momentum that is 1 / the number of batches, this one included.
    """
    for layer, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            names = [f"{layer}.{kind}".lstrip(".") for kind in _KINDS]
            tracked = [name for name in names if name in state]
            share = module.momentum
            if share is None and tracked:
                share = 1 / (float(state[f"{layer}.num_batches_tracked".lstrip(".")]) + 1)
            yield from ((name, float(share or 0.0)) for name in tracked)
