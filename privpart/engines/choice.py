"""Choice of a method: what the network's structure allows, then what a few clients take."""

import os
import shutil
from collections.abc import Sequence
from itertools import filterfalse
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor, nn

from accounting.checks import ConfigError
from privpart.client import LocalTraining
from privpart.engines.device import clock, namespace
from privpart.engines.frozen_prefix import feature_bytes
from privpart.engines.local_work import LocalWork, Method, lockstep_follows
from privpart.engines.lockstep import one_pass
from privpart.engines.products import worth_onednn
from privpart.messages import RoundTask

_MOST = 16
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
    return max(2, min(_MOST, int(_BUDGET / max(seconds, 1e-6))))


def refuse_other_than_lockstep(local: LocalTraining, active: Sequence[int] | None) -> None:
    """Refuse clients who could not be computed together, as "vmap" asks for."""
    if not lockstep_follows(local, active):
        raise ConfigError(
            "batching='vmap': clients whose groups take turns, or with another objective than "
            "fedavg, are computed one after another; use 'auto' or 'loop'."
        )


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
