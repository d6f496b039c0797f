"""Vision transformers: the image from position and patch embeddings, or from q, k and v.

For one image, each in closed form, on tokens z_n = E x_n + c_n of patches x_n:

- *embeddings*: the gradient of the position embedding is that of every token, g_n, and the patch
  embedding's is sum_n g_n x_n^T: linear equations in the patches.
- *span*: the gradient of q, k or v is sum_n d_n u_n^T, whose rows span the tokens u_n, layer
  normalisation or not. A patch whose token lies in the span solves linear equations of its own.
- *attention*: where the first attention acts on the tokens themselves and nothing bypasses it,
  sum_n g_n z_n^T = W_q^T dW_q + W_k^T dW_k + W_v^T dW_v (APRIL: Lu et al., CVPR 2022).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import fold

from attacks.observation import Observation
from attacks.reconstruction.analytic import best_inputs
from attacks.reconstruction.labels import label_candidates
from attacks.reconstruction.reconstruct import Reconstruction
from attacks.rounding import RANK, same
from attacks.update import ready, recording

_GREY = 0.5


@dataclass(frozen=True, slots=True)
class _Trace:
    """What one forward and backward pass of a probe shows."""

    patches: str  # name of the convolution that embeds the patches
    tokens: Tensor  # (N, d) its output
    token_slopes: Tensor  # (N, d) gradient of the loss in it
    slopes: dict[str, Tensor]  # gradient of the loss by parameter
    inputs: dict[str, Tensor]  # (T, d) of each dense layer or attention, by the name of its weight
    normed: dict[str, tuple[Tensor, Tensor]]  # (T, d) before and after each layer normalisation


@dataclass(frozen=True, slots=True)
class _Reached:
    """Dense layers in view that all take the tokens E x_n + c_n, normalised or not."""

    weights: tuple[str, ...]  # names, (O, d) each
    norm: str  # name of the layer normalisation before them, "" for none
    constants: Tensor  # (N, d), c_n
    first: int  # which of the rows is the first patch; before it is a class token, if any


def april(model: nn.Module, observation: Observation) -> Reconstruction | None:
    """Reconstruct one image from a vision transformer's first layers, in closed form.

    Layers are found by what they compute, not by their names: patches go through the convolution
    whose stride is its kernel, and what reaches an attention differs from its output by a constant.

    Return the solution that matches best; None where no closed form applies.
    """
    if observation.shape[0] != 1:
        return None
    probes = [_trace(model, observation, seed) for seed in (0, 1)]
    probe, second = probes
    if probe is None or second is None:
        return None
    kernel = observation.state[f"{probe.patches}.weight"].shape[2:]
    solutions = list(_from_embeddings(observation, probe, second))
    for reached in _reached(observation, probe, second):
        solutions.append(_in_span(observation, probe, reached))
        if not reached.norm:
            solutions += _through_attention(observation, probe, second, reached)
    images = [_image(patches, kernel, observation.shape) for patches in solutions]
    return best_inputs(model, observation, images)


def _from_embeddings(observed: Observation, probe: _Trace, second: _Trace) -> Iterator[Tensor]:
    """Yield the patches that the gradients of position and patch embedding have in common."""
    patch = observed.update.get(f"{probe.patches}.weight")
    if patch is None or not bool(patch.any()):
        return
    for slopes, first in _positions(observed, probe, second):
        yield _nearest_to_grey(slopes[first : first + len(probe.tokens)].T, patch.flatten(1))


def _positions(
    observed: Observation, probe: _Trace, second: _Trace
) -> Iterator[tuple[Tensor, int]]:
    """Yield each position embedding's gradient (T, d), and the row of the first patch."""
    count, width = probe.tokens.shape
    for name, value in observed.update.items():
        if value.numel() % width or value.numel() < count * width:
            continue
        a, b = (trace.slopes[name].reshape(-1, width) for trace in (probe, second))
        for first in range(len(a) - count + 1):
            rows = slice(first, first + count)
            if same(a[rows], probe.token_slopes) and same(b[rows], second.token_slopes):
                yield value.reshape(-1, width), first


def _reached(observed: Observation, probe: _Trace, second: _Trace) -> Iterator[_Reached]:
    """Yield what is known of the layers that the tokens reach first."""
    bias = observed.state.get(f"{probe.patches}.bias")
    shift = torch.zeros(()) if bias is None else bias
    visible = [name for name in probe.inputs if name in observed.update]
    groups: dict[tuple[str, int], tuple[list[str], Tensor]] = {}
    for name in visible:
        sources = {"": (probe.inputs[name], second.inputs[name])}
        for norm, (before, after) in probe.normed.items():
            if same(after, probe.inputs[name]):
                sources[norm] = (before, second.normed[norm][0])
        for norm, (a, b) in sources.items():
            constant = _constant(probe, second, a, b)
            if constant is not None:
                first, added = constant
                groups.setdefault((norm, first), ([], shift + added))[0].append(name)
    for (norm, first), (weights, constants) in groups.items():
        yield _Reached(tuple(weights), norm, constants, first)


def _constant(probe: _Trace, second: _Trace, a: Tensor, b: Tensor) -> tuple[int, Tensor] | None:
    """Return the first row, and what is added to the tokens there; None if it is not constant."""
    count, width = probe.tokens.shape
    if a.shape != b.shape or a.shape[-1] != width:
        return None
    for first in range(len(a) - count + 1):
        rows = slice(first, first + count)
        if same(a[rows] + second.tokens, b[rows] + probe.tokens):  # a - one is b - two, even if 0
            return first, a[rows] - probe.tokens
    return None


def _in_span(observed: Observation, probe: _Trace, reached: _Reached) -> Tensor:
    """Return the patches whose tokens are in the row space of the layers' gradients.

    Outside of the span, scale * centred(E x + c) + size * shift vanishes: linear in the patch and
    in the size of the token. A patch with more pixels than equations stays near to grey.
    """
    grad = torch.cat([observed.update[name] for name in reached.weights])
    _, size, right = torch.linalg.svd(grad, full_matrices=True)
    outside = right[int((size > RANK * size[0]).sum()) :]
    embedding = observed.state[f"{probe.patches}.weight"].flatten(1)
    constants = reached.constants
    pixels = embedding.shape[1]
    if not reached.norm:
        return _nearest_to_grey(outside @ embedding, -outside @ constants.T).T
    scale, shift = (
        observed.state[name] if name in observed.state else torch.full((len(right),), absent)
        for name, absent in ((f"{reached.norm}.weight", 1.0), (f"{reached.norm}.bias", 0.0))
    )
    terms = outside @ (scale[:, None] * (embedding - embedding.mean(0)))
    fixed = outside @ (scale * (constants - constants.mean(1, keepdim=True))).T
    if bool(shift.any()):
        terms = torch.cat([terms, (outside @ shift.double())[:, None]], 1)
    return _nearest_to_grey(terms, -fixed).T[:, :pixels]


def _through_attention(
    observed: Observation, probe: _Trace, second: _Trace, reached: _Reached
) -> Iterator[Tensor]:
    """Yield the patches by APRIL's equation, from every position embedding in view."""
    product = torch.stack(
        [observed.state[name].T @ observed.update[name] for name in reached.weights]
    ).sum(0)
    embedding = observed.state[f"{probe.patches}.weight"].flatten(1)
    for slopes, first in _positions(observed, probe, second):
        tokens = _solve(slopes.T, product)[first : first + len(probe.tokens)]
        yield _nearest_to_grey(embedding, (tokens - reached.constants).T).T


def _nearest_to_grey(terms: Tensor, fixed: Tensor) -> Tensor:
    """Return the least-squares solution of terms @ X = fixed that is nearest to grey."""
    return _GREY + _solve(terms, fixed - _GREY * terms.sum(1, keepdim=True))


def _solve(terms: Tensor, fixed: Tensor) -> Tensor:
    solution: Tensor = torch.linalg.lstsq(terms, fixed, rcond=RANK, driver="gelsd").solution
    return solution


def _image(patches: Tensor, kernel: torch.Size, shape: tuple[int, ...]) -> Tensor:
    """Return patches (N, P) as an image, (1, C * H * W); a border without a patch is grey."""
    size = (shape[2] // kernel[0] * kernel[0], shape[3] // kernel[1] * kernel[1])
    image = torch.full(shape, _GREY, dtype=torch.float64)
    sides = (kernel[0], kernel[1])
    image[:, :, : size[0], : size[1]] = fold(patches.T[None], size, sides, stride=sides)
    return image.flatten(1)


def _trace(model: nn.Module, observed: Observation, seed: int) -> _Trace | None:
    """Return what a random image shows; None where the model does not embed patches."""
    twin = ready(model, observed.training)
    embeddings = [name for name, module in twin.named_modules() if _embeds_patches(module)]
    if not embeddings:
        return None
    generator = torch.Generator().manual_seed(seed)
    probe = torch.rand(observed.shape, generator=generator, dtype=torch.float64)
    state = {name: value.clone() for name, value in observed.state.items()}
    leaves = {name: state[name].requires_grad_() for name in observed.update}
    state[f"{embeddings[0]}.weight"].requires_grad_()
    kinds = (nn.Conv2d, nn.Linear, nn.LayerNorm, nn.MultiheadAttention)
    with recording(twin, kinds) as calls:
        logits = functional_call(twin, state, (probe,))
    tokens = [call.output for call in calls if call.name == embeddings[0]]
    if len(tokens) != 1:
        return None
    label = label_candidates(model, observed)[0]
    slopes = torch.autograd.grad(
        observed.loss(logits, label), [tokens[0], *leaves.values()], materialize_grads=True
    )
    weights = {nn.Linear: "weight", nn.MultiheadAttention: "in_proj_weight"}
    return _Trace(
        patches=embeddings[0],
        tokens=_rows(tokens[0].flatten(2).mT),
        token_slopes=_rows(slopes[0].flatten(2).mT),
        slopes=dict(zip(leaves, slopes[1:], strict=True)),
        inputs={
            f"{call.name}.{weight}": _rows(call.inputs)
            for call in calls
            for kind, weight in weights.items()
            if isinstance(call.module, kind)
        },
        normed={
            call.name: (_rows(call.inputs), _rows(call.output))
            for call in calls
            if isinstance(call.module, nn.LayerNorm)
        },
    )


def _embeds_patches(module: nn.Module) -> bool:
    """Return whether ``module`` is a convolution of patches that do not overlap."""
    return (
        isinstance(module, nn.Conv2d)
        and tuple(module.kernel_size) == tuple(module.stride)
        and math.prod(module.kernel_size) > 1
        and module.padding in ((0, 0), "valid")
        and module.groups == 1
    )


def _rows(value: Tensor) -> Tensor:
    return value.detach().flatten(0, -2)
