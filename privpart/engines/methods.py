"""Local work: the updates of some simulated clients, computed in one of several ways.

Choice of a method: what the network's structure allows, then what a few clients take.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import filterfalse
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from privpart.client import LocalTraining, client_update
from privpart.clip import clip
from privpart.data.users import Users
from privpart.engines.device import clock, full_float32, namespace
from privpart.engines.frozen_prefix import Features, feature_bytes
from privpart.engines.ghost_sum import OneStep
from privpart.engines.onednn import by_onednn, worth_onednn
from privpart.engines.vectorized import Lockstep, one_pass, padded, sum_of_losses, to_channels_last
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


_MOST_TRIED = 16
_BUDGET = 0.5  # seconds
_SAME = 1e-2
"""Relative difference of updates above which a method computes something else, not roundings."""
_SHARED_MEMORY = Path("/dev/shm")


def choose(
    work: LocalWork, task: RoundTask, start: Tensor, *, bfloat16: bool = False, sums: bool = False
) -> tuple[Method, Method, str]:
    """Return the fastest way to each update, the fastest to all or their sum, and why, in words.

    Tries a few clients of the task in every way that the structure allows; a way that fails, or
    that does not agree with one client after another, is out. At least one must have examples.
    """
    candidates = _candidates(work, task, bfloat16=bfloat16)
    candidates += [Method(summed=True)] if sums and work.summed_at_once(task) else []
    if len(candidates) == 1:
        return candidates[0], candidates[0], "the only way for this network"
    asked = [client for client in task.clients if len(work.users.indices[client])]
    clients = asked[: _tried(work, task, asked[:1], start, candidates[0])]
    out = torch.empty(len(clients), work.model.active_dim(task.active))
    least, notes = _agreeing(work, task, clients, start, candidates, out)
    for method in [*least, *least]:  # in turns: a busy moment of the machine meets all of them
        least[method] = min(least[method], _seconds(work, task, clients, start, method, out))
    times = ", ".join(f"{m} {1000 * s / len(clients):.2f} ms" for m, s in least.items())
    fastest = sorted(least, key=lambda method: least[method])
    each = next(filterfalse(attrgetter("summed"), fastest))
    return each, fastest[0], f"a client takes {times}{''.join(notes)}"


def _agreeing(
    work: LocalWork,
    task: RoundTask,
    clients: Sequence[int],
    start: Tensor,
    candidates: Sequence[Method],
    out: Tensor,
) -> tuple[dict[Method, float], list[str]]:
    """Seconds of the ways that compute what the first one does, and a note on each other."""
    reference, notes = None, []
    seconds: dict[Method, float] = {}
    for method in candidates:
        try:
            took = _seconds(work, task, clients, start, method, out)
        except RuntimeError:
            if reference is None:
                raise
            notes.append(f"; {method} fails")  # torch.func cannot follow the network
            continue
        if reference is None:
            reference = out.clone()
        expected = reference.sum(dim=0, keepdim=True) if method.summed else reference
        if _same(out[: len(expected)], expected):
            seconds[method] = took
        else:
            notes.append(f"; {method} deviates")
    return seconds, notes


def _tried(
    work: LocalWork, task: RoundTask, one: Sequence[int], start: Tensor, first: Method
) -> int:
    """As many clients as one after another take the time for, between two and sixteen."""
    out = torch.empty(1, work.model.active_dim(task.active))
    seconds = min(
        _seconds(work, task, one, start, first, out) for _ in range(2)
    )  # the first one also warms up
    return max(2, min(_MOST_TRIED, int(_BUDGET / max(seconds, 1e-6))))


def prefix_fits(below: nn.Sequential, x: Tensor) -> bool:
    """Whether the outputs of a frozen prefix take at most half of the free memory of x's device."""
    return feature_bytes(below, x) <= _free_memory(x.device) // 2


def _free_memory(device: torch.device) -> int:
    if device.type != "cpu":
        return int(namespace(device).mem_get_info(device)[0])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if _SHARED_MEMORY.is_dir():
        free = min(free, shutil.disk_usage(_SHARED_MEMORY).free)
    return free


def _candidates(work: LocalWork, task: RoundTask, *, bfloat16: bool) -> list[Method]:
    """One after another first: it always works.

    Many clients' convolutions become one grouped convolution, which is slow on a CPU; not so in a
    single step, in which all clients still share the filters. Of an accelerator nothing is taken
    for granted: there they are timed, too.
    """
    convolutional = work.convolutional
    bags = any(isinstance(layer, nn.EmbeddingBag) for layer in work.model.module.modules())
    if bags or work.local.loss != "cross_entropy":
        return [
            Method(bfloat16=bfloat16)
        ]  # torch.func has no batches of bags; padding needs classes
    methods = [Method(bfloat16=bfloat16)]
    if convolutional:
        methods.append(Method(channels_last=True, bfloat16=bfloat16))
    on_cpu = work.device.type == "cpu"
    if on_cpu and not bfloat16 and worth_onednn(work.model.module, _examples_of_a_batch(work)):
        methods.append(Method(channels_last=convolutional, onednn=True))
    if bfloat16 or not lockstep_follows(work.local, task.active):
        return methods
    worth_trying = not on_cpu or one_pass(work.local)
    if not convolutional or worth_trying:
        methods.append(Method(together=True))
    if convolutional and worth_trying:
        methods.append(Method(together=True, channels_last=True))
    return methods


def _examples_of_a_batch(work: LocalWork) -> int:
    """What a dense layer sees as examples: also each word of a text."""
    y = work.users.y
    return work.local.batch_size * (y[0].numel() if len(y) else 1)


def _same(found: Tensor, reference: Tensor) -> bool:
    """Whether no client's update differs by more than rounding makes of it.

    Not idle: oneDNN is wrong about some convolutions of one channel, channels last (torch 2.13,
    kernel (2, 3), stride (1, 2)).
    """
    lengths = reference.norm(dim=1)
    lengths = lengths.clamp(min=max(float(lengths.median()), 1e-30))  # some have nothing to learn
    return bool(((found - reference).norm(dim=1) / lengths).max() < _SAME)


def _seconds(
    work: LocalWork,
    task: RoundTask,
    clients: Sequence[int],
    start: Tensor,
    method: Method,
    out: Tensor,
) -> float:
    """What the clients take. A sum is the first row."""
    total = torch.empty(out.shape[1], dtype=torch.float64)
    began = clock(work.device)
    if method.summed:
        work.sum(task, clients, start, total)
    else:
        work.updates(task, clients, start, method, out)
    seconds = clock(work.device) - began
    if method.summed:
        out[0] = total
    return seconds
