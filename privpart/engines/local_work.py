"""Local work: the updates of some simulated clients, computed in one of several ways."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from privpart.client import LocalTraining, client_update
from privpart.clip import clip
from privpart.data.users import Rows, Users
from privpart.engines.device import full_float32
from privpart.engines.frozen_prefix import Features
from privpart.engines.lockstep import Lockstep, one_pass, padded, sum_of_losses, to_channels_last
from privpart.engines.one_step import OneStep
from privpart.engines.products import by_onednn
from privpart.messages import RoundTask
from privpart.model import PartialModel

_EXAMPLES = 256
"""In one pass of ``sum``, at most, but for one client's."""

_PASS_BYTES = 2**24
"""Of examples, or of gradients of single clients, in one pass of ``sum``."""


@dataclass(frozen=True, slots=True)
class Method:
    """How clients are computed. All ways are the same training, up to rounding.

    Attributes:
        together: in lockstep, as one batched computation; else one after another.
        channels_last: convolutions on images whose channels lie next to each other in memory.
        onednn: large dense layers multiplied by oneDNN; not together.
        bfloat16: products of matrices and convolutions rounded to 8 bits (torch.autocast); the
            parameters stay float32. Never chosen by itself.
        summed: only the sum of the clipped updates comes out, of one pass; see ``OneStep``.
    """

    together: bool = False
    channels_last: bool = False
    onednn: bool = False
    bfloat16: bool = False
    summed: bool = False

    def __str__(self) -> str:
        if self.summed:
            return "clients summed in one pass"
        name = "clients together (vmap)" if self.together else "one client after another"
        layout = ", channels last" if self.channels_last else ""
        products = ", dense layers by oneDNN" if self.onednn else ""
        return name + layout + products + (", bfloat16" if self.bfloat16 else "")


class LocalWork:
    """Computes clients of one population.

    Args:
        model: shared by all; its trained part is overwritten. Clients are computed on its device.
        users: the clients' data, on the model's device.
        local: how each trains.
        data_seed: order of examples; each (round, client) has its own generator, so no result
            depends on which clients ran before it.
        features: outputs of the frozen prefix, if ``model`` is only what lies behind it.
    """

    def __init__(
        self,
        model: PartialModel,
        users: Users,
        *,
        local: LocalTraining,
        data_seed: int,
        features: Features | None = None,
    ) -> None:
        self.model, self.users = model, users
        self.features = features
        self.convolutional = any(isinstance(m, nn.Conv2d) for m in model.module.modules())
        self._data_seed = data_seed
        self._lockstep = Lockstep(model, local)
        self._one_step = OneStep(model) if OneStep.possible(model) else None

    @property
    def local(self) -> LocalTraining:
        """How each client trains from now on; may be set, for a schedule."""
        return self._lockstep.local

    @local.setter
    def local(self, local: LocalTraining) -> None:
        self._lockstep.local = local

    def updates(
        self, task: RoundTask, clients: Sequence[int], start: Tensor, method: Method, out: Tensor
    ) -> None:
        """Write each client's clipped update into ``out``, shape (clients, c), c numbers active.

        Where groups take turns, and with FedProx, clients train one after another. ``start`` and
        ``out`` are on the CPU, wherever clients are computed.
        """
        with full_float32(self.device):
            self._updates(task, clients, start.to(self.device), method, out)

    def _updates(
        self, task: RoundTask, clients: Sequence[int], start: Tensor, method: Method, out: Tensor
    ) -> None:
        rows = self._rows(clients)
        generators = [client_generator(self._data_seed, task.round, client) for client in clients]
        x, y = self.x, self.users.y
        out = out[: len(clients)]
        if method.together and lockstep_follows(self.local, task.active):
            last = method.channels_last
            found = out if start.is_cpu else torch.empty_like(out, device=start.device)
            for place in self._lockstep.changes(
                start, x, y, rows, generators, out=found, channels_last=last
            ):
                change = out[place]
                if found is not out:  # clipped on the CPU, as in ``client_update``
                    change.copy_(found[place])
                clipped = clip(change, task.clip_norm, out=change)
                if clipped is not change:
                    change.copy_(clipped)
            return
        # autocast's cache would hold on to the weights of the first step
        rounded = torch.autocast(
            self.device.type, torch.bfloat16, enabled=method.bfloat16, cache_enabled=False
        )
        module = self.model.module
        images = _channels_last(module, method.channels_last)
        with images, by_onednn(module, method.onednn), rounded:
            for to, own, generator in zip(out, rows, generators, strict=True):
                client_update(
                    self.model,
                    start,
                    x[own],
                    y[own],
                    local=self.local,
                    clip_norm=task.clip_norm,
                    generator=generator,
                    active=task.active,
                    out=to,
                )

    def sum(self, task: RoundTask, clients: Sequence[int], start: Tensor, out: Tensor) -> int:
        """Write the sum of clients' clipped updates into ``out``, shape (d,), float64.

        The pass has ``batch_size`` rows for each of them, whatever they hold: another number of
        rows is other rounding, by which one client's data would reach the others' updates.

        Only if ``summed_at_once(task)`` is not 0.

        Returns:
            How many were not clipped.
        """
        if self._one_step is None:
            raise RuntimeError("not a network whose first steps can be taken in one pass")
        rows = zip(clients, self._rows(clients), strict=True)
        batches = [self._first_batch(task, client, own) for client, own in rows]
        x, y = padded(self.x, self.users.y, batches, self.local.batch_size)
        return self._one_step.sum(
            start,
            x,
            lambda logits: sum_of_losses(logits.view(*y.shape[:2], *logits.shape[1:]), y),
            learning_rate=self.local.learning_rate,
            clip_norm=task.clip_norm,
            out=out,
        )

    def _first_batch(self, task: RoundTask, client: int, own: Tensor) -> Tensor:
        if len(own) <= self.local.batch_size:
            return own  # in any order
        generator = client_generator(self._data_seed, task.round, client)
        return own[next(self.local.batches(len(own), generator))]

    def summed_at_once(self, task: RoundTask) -> int:
        """Return of how many clients ``sum`` can do; 0 where it computes something else.

        Public: neither who is asked nor what they hold has a part in it.
        """
        local, network = self.local, self._one_step
        plain = one_pass(local) and local.loss == "cross_entropy"
        if network is None or not plain or not lockstep_follows(local, task.active):
            return 0
        if len(set(task.clients)) < len(task.clients):
            return 0  # only updates one by one can be refused one by one
        examples = min(_EXAMPLES, _PASS_BYTES // (4 * max(1, self.x[:1].numel())))
        written = _PASS_BYTES // (4 * max(1, network.written))
        return min(examples // local.batch_size, max(1, written))

    def _rows(self, clients: Sequence[int]) -> list[Tensor]:
        """Each client's rows, once ``x`` has them."""
        rows = [self.users.indices[client] for client in clients]
        if self.features is not None and rows:
            self.features.compute(rows)
        return rows

    @property
    def device(self) -> torch.device:
        """Where clients are computed."""
        return self.model.flat.device

    @property
    def x(self) -> Tensor:
        """What the model sees of all examples, shape (n, ...)."""
        return self.users.x if self.features is None else self.features.values


def lockstep_follows(local: LocalTraining, active: Sequence[int] | None) -> bool:
    """Whether clients can train together at all: not where groups take turns, nor FedProx."""
    return active is None and local.objective == "fedavg"


def client_generator(data_seed: int, round_: int, client: int) -> torch.Generator:
    """Return the generator of one client in one round, whoever else takes part."""
    address = np.random.SeedSequence((data_seed, round_, client)).generate_state(1)
    return torch.Generator().manual_seed(int(address[0]))


@contextmanager
def _channels_last(module: nn.Module, wanted: bool) -> Iterator[None]:
    """Lay out the images that reach ``module`` so; every convolution behind keeps the layout."""
    if not wanted:
        yield
        return
    hooks = [module.register_forward_pre_hook(_to_channels_last)]
    norms = [layer for layer in module.modules() if isinstance(layer, nn.GroupNorm)]
    hooks += [norm.register_forward_pre_hook(_for_the_lowest) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _for_the_lowest(norm: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Undo the layout: torch 2.13 ends the process in the backward pass of such a trained norm."""
    x, *others = inputs
    if x.requires_grad or not any(p.requires_grad for p in norm.parameters()):
        return inputs
    return (x.clone(memory_format=torch.contiguous_format), *others)


def _to_channels_last(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (to_channels_last(inputs[0]), *inputs[1:])
