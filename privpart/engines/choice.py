"""Choice: the method of a training, by a rule, and the check that it is the same training.

The rule looks at the network, the clients' local training and the size of the cohort, never at a
clock, so that a training computes alike whatever else the machine does:

ghost clipping      clients of one step, of a sequence of known layers, if sums are allowed
vectorized          steps whose products with trained weights take less time than to call torch,
                    of parts that fit into the processor's cache many times, by enough clients
one after another   all others

A GPU waits for Python rather than for products, so it repeats recorded steps of plain SGD, one
client after another; of all else it does the same. benchmarks/engine_rule.py measures the rule.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from privpart.clip import clip
from privpart.engines.methods import LocalComputation, Method
from privpart.messages import ClientId, RoundTask

_SMALL_STEP = 10**7  # products of a client's step up to which a CPU vectorizes clients
_SMALL_PART = 100_000  # and parameters that train: more copies leave the processor's cache
_PART_OF_A_CLIENT = 10_000  # of them per client: few clients gain less than the copies cost
_MANY_TENSORS = 8  # that train: their layers' calls outweigh what torch.func adds to each step
_CHECKED_STEPS = 2
_NEVER_REACHED = 1e30  # clip norm of compared updates: clipping would hide one twice as long
_NOTHING = 1e-6  # of the clip norm: a shorter update is that of a client with nothing to learn
_TOLERANCE = 1e-2  # relative difference of updates above which a method does more than round
_ROUNDED_TOLERANCE = 0.5
"""The same of two ways that round to bfloat16; Adam may turn a gradient's sign of rounding."""


def fastest(
    computation: LocalComputation, task: RoundTask, *, sums: bool, bfloat16: bool = False
) -> Method:
    """Return the method that the rule gives for a round.

    ``sums`` allows ghost clipping, which never rounds to ``bfloat16``: its products are float64.
    """
    if computation.one_at_a_time:
        return Method(bfloat16=bfloat16)
    if sums and computation.clients_per_ghost_sum(task):
        return Method(ghost_sum=True)
    if not bfloat16 and computation.device.type == "cuda" and computation.recordable(task):
        return Method(recorded=True)
    model, clients = computation.model, len(task.clients)
    enough = clients >= (3 if len(model.trainable) >= _MANY_TENSORS else 5)
    small = enough and model.dim <= min(_SMALL_PART, _PART_OF_A_CLIENT * clients)
    small = small and _products_of_a_step(computation) <= _SMALL_STEP
    return Method(vectorized=computation.vectorizable and small, bfloat16=bfloat16)


def _products_of_a_step(computation: LocalComputation) -> int:
    """Return about how many products of a step have a weight that trains.

    Those of frozen weights are one product for all clients, so they gain at any size.
    """
    x, model = computation.x, computation.model
    trained = {id(model.module.get_parameter(name)) for name in model.trainable}
    # hardly any network convolves larger images than its input
    pixels = x[:1].numel() // max(1, x.shape[1]) if x.dim() > 1 else 1
    products = 0
    for layer in model.module.modules():
        weights = [p for p in layer.parameters(recurse=False) if p.dim() > 1 and id(p) in trained]
        if not isinstance(layer, nn.Embedding):
            repeated = pixels if isinstance(layer, nn.Conv2d) else computation.words
            products += sum(p.numel() for p in weights) * repeated
    return computation.batch_rows * products


def agrees(computation: LocalComputation, task: RoundTask, start: Tensor, method: Method) -> bool:
    """Return whether a method computes what one client after another does, up to rounding.

    It is compared on the clients of the round with the fewest and the most examples, by the steps
    of a full batch and of their last one: torch.func does not support every network, and padded
    batches are another training for networks that look at the batch. At least one client of the
    task must have examples. Of a method in bfloat16, whose rounding would hide that, float32 is
    compared so, and what it rounds itself more coarsely.

    Raises:
        ConfigError: one client after another cannot be trained either.
    """
    if method.bfloat16 and not agrees(computation, task, start, replace(method, bfloat16=False)):
        return False
    tolerance = _ROUNDED_TOLERANCE if method.bfloat16 else _TOLERANCE
    size = {client: len(computation.users.indices[client]) for client in task.clients}
    asked = sorted((client for client in size if size[client]), key=lambda c: (size[c], str(c)))
    clients = list(dict.fromkeys([asked[-1], asked[0]]))
    local = computation.local
    # all parameters move, if they take turns
    steps = max(_CHECKED_STEPS, len(local.alternate))
    computation.local = replace(local, epochs=1, steps=min(local.steps or steps, steps))
    computation.ends_only = True
    try:
        loop = Method(bfloat16=method.bfloat16)
        reference = _updates(computation, task, clients, start, loop).nan_to_num()
        try:
            if method.ghost_sum:
                return _sum_agrees(computation, task, clients, start, reference)
            computed = _updates(computation, task, clients, start, method).nan_to_num()
        except Exception:
            return False
        pairs = zip(computed, reference, strict=True)
        return all(_close(*pair, task, tolerance) for pair in pairs)
    finally:
        computation.local, computation.ends_only = local, False


def _updates(
    computation: LocalComputation,
    task: RoundTask,
    clients: list[ClientId],
    start: Tensor,
    method: Method,
) -> Tensor:
    out = torch.empty(len(clients), computation.model.active_dim(task.active))
    task = replace(task, clip_norm=_NEVER_REACHED)
    computation.updates(task, clients, start, method, out)
    return out


def _sum_agrees(
    computation: LocalComputation,
    task: RoundTask,
    clients: list[ClientId],
    start: Tensor,
    reference: Tensor,
) -> bool:
    clients = clients[: computation.clients_per_ghost_sum(task)]
    longest = float(reference.norm(dim=1).max())
    # shorter than some update, so that the sum depends on norms, too
    clip_norm = longest / 2 if longest > _NOTHING * task.clip_norm else task.clip_norm
    total = torch.empty(reference.shape[1], dtype=torch.float64)
    shorter = replace(task, clip_norm=clip_norm, sum_clip_norm=None)
    computation.summed(shorter, clients, start, Method(ghost_sum=True), total)
    expected = sum(clip(update, clip_norm) for update in reference[: len(clients)])
    return _close(total.float().nan_to_num(), torch.as_tensor(expected), task)


def _close(
    computed: Tensor, reference: Tensor, task: RoundTask, tolerance: float = _TOLERANCE
) -> bool:
    length = max(float(reference.norm()), _NOTHING * task.clip_norm)
    return float((computed - reference).norm()) < tolerance * length
