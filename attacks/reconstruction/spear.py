"""SPEAR: the inputs of a batch from the gradient of a dense layer before a ReLU, exactly.

Dimitrov, Baader, Müller and Vechev (NeurIPS 2024). The weight's gradient is dY^T X, a product of
rank B: it gives X up to an invertible (B, B) matrix, and the ReLU's zeros in dY single out that
matrix. A neuron that several images activate need not be told apart, so batches come out of layers
in which ``invert_dense_rows`` finds no neuron of one image alone.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from accounting import checks
from attacks.observation import Observation
from attacks.reconstruction.analytic import best_inputs, brightest_is_one, visible_dense
from attacks.reconstruction.reconstruct import Reconstruction
from attacks.rounding import RANK
from attacks.update import as_double, ready, recording

_ZERO = 1e-4  # an entry of a unit column below this, relative to the largest, counts as zero
_SAME = 1e-4  # of 1: cosine within which two directions count as one
_PARALLEL = 1e-8  # of 1: cosine within which two rows belong to the same image
_CHUNK = 2048  # sets of rows that are tried at once
_SPARE = 3  # zeros beyond those that any set of rows forces, before a direction is believed
_KEPT = 512  # directions that are remembered


def spear(
    model: nn.Module, observation: Observation, *, draws: int = 100_000, seed: int = 0
) -> Reconstruction | None:
    """Invert each visible dense layer as wide as the image, for batches of two or more.

    Also inverted are two dense layers in a row without a bias between, the first as wide as the
    image: LoRA's A and B, once B is no longer zero. Their rank must be at least the batch.

    At most ``draws`` sets of neurons are tried per layer. A set of B - 1 neurons says something if
    one image activates none of them: about B sets of 2^(B - 1).

    Return the reconstruction; None where no layer is that wide, or none lets the images out.
    """
    options = {"draws": checks.count("draws", draws), "seed": checks.count("seed", seed, minimum=0)}
    batch = observation.shape[0]
    if batch == 1:
        return None
    layers = {name: (gw, gb) for name, gw, gb in visible_dense(model, observation)}
    inputs: dict[str, Tensor | None] = {}
    for name, (gw, gb) in layers.items():
        inputs[name] = unmix(gw, gb, batch, **options)
    for first, second in _in_a_row(model, observation):
        if first in layers and second in layers:
            weight = observation.state[f"{second}.weight"]
            inputs[first] = unmix_low_rank(
                layers[first][0], layers[second][0], weight, batch, **options
            )
    pixels = math.prod(observation.shape[1:])
    wide = [rows for rows in inputs.values() if rows is not None and rows.shape[1] == pixels]
    return best_inputs(model, observation, wide)


def unmix(
    weight_grad: Tensor, bias_grad: Tensor | None, batch: int, *, draws: int, seed: int = 0
) -> Tensor | None:
    """Return the inputs of a dense layer before a ReLU, or None where they do not come apart.

    Without the bias an input is known up to its scale: its entry of greatest magnitude is set to 1.

    The gradients are (O, I) and (O,); the inputs (n, I) float64, n <= batch: equal inputs, and
    inputs that activate nothing, are one or none.

    >>> x = torch.tensor([[0.0, 1.0, 0.5], [0.5, 0.25, 0.0]]).double()
    >>> gb = torch.tensor([[1.0, 0, 2, 3, 0, 0, 0, 4], [0, -2, 1, 0, 1, 3, 5, 0]]).double()
    >>> unmix(gb.T @ x, gb.sum(0), 2, draws=100).round(decimals=6).abs()
    tensor([[0.0000, 1.0000, 0.5000],
            [0.5000, 0.2500, 0.0000]], dtype=torch.float64)
    """
    factors = _factors(weight_grad, batch)
    if factors is None:
        return None
    slopes, right = factors
    columns = _sparse_columns(slopes, draws, seed)
    if columns is None:
        return None
    mixed: Tensor = torch.linalg.solve(columns, right)
    if bias_grad is None:
        return brightest_is_one(mixed)
    scales = torch.linalg.lstsq(slopes @ columns, as_double(bias_grad)[:, None]).solution
    inputs: Tensor = mixed / scales
    return inputs if bool(inputs.isfinite().all()) else None


def unmix_low_rank(
    first_grad: Tensor,
    second_grad: Tensor,
    second: Tensor,
    batch: int,
    *,
    draws: int,
    seed: int = 0,
) -> Tensor | None:
    """Return the inputs of LoRA's A from the gradients of A and B, up to the scale of each.

    B's gradient is dY^T (X A^T): its zeros tell dY up to the scale of its columns. A's gradient
    is B^T dY^T X, in which dY is then known.

    Return (n, I) float64, the entry of greatest magnitude of each set to 1, from the gradients
    (r, I) of A and (O, r) of B and B itself; None while B is zero. More inputs than r are not told
    apart.
    """
    factors = _factors(second_grad, batch)
    if factors is None or not bool(first_grad.any()):
        return None
    columns = _sparse_columns(factors[0], draws, seed)
    if columns is None:
        return None
    mixing = second.T @ factors[0] @ columns
    if float(torch.linalg.cond(mixing)) > 1 / RANK:
        return None
    return brightest_is_one(torch.linalg.lstsq(mixing, as_double(first_grad)).solution)


def _factors(grad: Tensor, batch: int) -> tuple[Tensor, Tensor] | None:
    """Return L (O, n) and R (n, I) with L R = grad, n <= batch; None if its rank is higher."""
    gw = as_double(grad)
    slopes, size, right = torch.linalg.svd(gw, full_matrices=False)
    rank = int((size > RANK * size[0]).sum())
    if not 0 < rank <= batch or rank == min(gw.shape):
        return None
    return slopes[:, :rank], size[:rank, None] * right[:rank]


def _sparse_columns(slopes: Tensor, draws: int, seed: int) -> Tensor | None:
    """Return (n, n) unit columns q for which ``slopes`` q has most zeros, or None.

    The search ends when as many draws again have changed nothing: a combination of two columns has
    zeros too, where both have them, and so it never replaces a column that has been found.
    """
    slopes = slopes[slopes.norm(dim=1) > _ZERO * slopes.norm(dim=1).max()]
    rank = slopes.shape[1]
    if rank == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    spaces = _spaces(slopes)
    rng = np.random.default_rng(seed)
    directions = torch.empty(0, rank, dtype=torch.float64)
    columns: Tensor | None = None
    best, since, drawn = 0, 0, 0
    while drawn < draws:
        candidates = [_silenced(slopes, space, rng, _CHUNK // len(spaces) + 1) for space in spaces]
        directions = _distinct(torch.cat([directions, *candidates]), slopes)
        drawn += _CHUNK
        chosen = _independent(directions, rank)
        zeros = int(_zeros(slopes, chosen).sum()) if len(chosen) == rank else 0
        if zeros > best:
            columns, best, since = chosen.T, zeros, drawn
        elif best and drawn >= 2 * since:
            break
    return columns


def _spaces(slopes: Tensor) -> list[Tensor]:
    """Return orthonormal bases (B, d) of spaces that contain all columns between them.

    Neurons that one image alone activates have parallel rows p, and every column of another image
    is orthogonal to p. Each such image leaves one dimension less to search.
    """
    unit = slopes / slopes.norm(dim=1, keepdim=True)
    alike = (unit @ unit.T).abs() > 1 - _PARALLEL
    first = alike.int().argmax(1)
    alone = unit[[i for i in range(len(unit)) if int((first == i).sum()) > 1]]
    alone = _independent(alone, slopes.shape[1])
    if len(alone) == 0:
        return [torch.eye(slopes.shape[1], dtype=torch.float64)]
    lacking = [torch.cat([alone[:i], alone[i + 1 :]]) for i in range(len(alone))]
    bases = [
        torch.linalg.qr(rows.T, mode="complete").Q[:, len(rows) :] for rows in [alone, *lacking]
    ]
    return [basis for basis in bases if basis.shape[1]]


def _silenced(slopes: Tensor, space: Tensor, rng: np.random.Generator, count: int) -> Tensor:
    """Return the unit vectors (n, B) of ``space`` that silence a set of rows, and more besides."""
    inside = slopes @ space
    size = space.shape[1] - 1
    if size == 0:
        return space.T
    useful = (inside.norm(dim=1) > _ZERO * inside.norm(dim=1).max()).nonzero()[:, 0]
    if len(useful) <= size:
        return slopes[:0]
    sets = rng.random((count, len(useful))).argpartition(size, axis=1)[:, :size]
    basis, upper = torch.linalg.qr(inside[useful[torch.from_numpy(sets)]].mT, mode="complete")
    sure = upper.diagonal(dim1=1, dim2=2).abs().amin(1) > _ZERO
    vectors: Tensor = basis[sure, :, -1] @ space.T
    return vectors[_zeros(slopes, vectors) >= slopes.shape[1] - 1 + _SPARE]


def _zeros(slopes: Tensor, vectors: Tensor) -> Tensor:
    """Return how many entries of each ``slopes`` v are zero."""
    reached = (vectors @ slopes.T).abs()
    return (reached <= _ZERO * reached.amax(1, keepdim=True)).sum(1)


def _distinct(vectors: Tensor, slopes: Tensor) -> Tensor:
    """Return the vectors without repetition, those with most zeros first."""
    order = _zeros(slopes, vectors).argsort(descending=True, stable=True)
    vectors = vectors[order]
    alike = (vectors @ vectors.T).abs() > 1 - _SAME
    return vectors[~alike.tril(-1).any(1)][:_KEPT]


def _independent(vectors: Tensor, rank: int) -> Tensor:
    """Return the first vectors of which none is a combination of those before it, (n, B)."""
    chosen: list[Tensor] = []
    basis = torch.empty(0, rank, dtype=torch.float64)
    for vector in vectors:
        beyond = vector - (vector @ basis.T) @ basis
        if float(beyond.norm()) > _ZERO:
            chosen.append(vector)
            basis = torch.cat([basis, (beyond / beyond.norm())[None]])
        if len(chosen) == rank:
            break
    return torch.stack(chosen) if chosen else basis


def _in_a_row(model: nn.Module, observation: Observation) -> list[tuple[str, str]]:
    """Return the names of dense layers without a bias, the output of one being another's input."""
    twin = ready(model, observation.training)
    grey = torch.full(observation.shape, 0.5, dtype=torch.float64)
    with torch.no_grad(), recording(twin, nn.Linear) as calls:
        functional_call(twin, dict(observation.state), (grey,))
    return [
        (first.name, second.name)
        for first in calls
        for second in calls
        if first.output is second.inputs and getattr(first.module, "bias", None) is None
    ]
