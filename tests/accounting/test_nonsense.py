"""No public function makes a number out of NaN, infinity or a value out of range.

Every name that ``accounting`` exports, and every public method of its classes, must have an entry
in ``VALID`` that names each number it takes: a new function or argument without one fails.
"""

import inspect
import math

import numpy as np
import pytest

import accounting
from accounting import (
    BinaryTree,
    ConfigError,
    CrossCheck,
    Guarantee,
    Independent,
    Participation,
    PoissonSampling,
    PrivacyReport,
    SampledGuarantee,
    Sensitivity,
)

RUN = BinaryTree(64), Participation(64)
SAMPLING = PoissonSampling(10, 1000)
BINS = accounting.BallsInBins(8, 8)


def on_run(function):
    return lambda **numbers: function(*RUN, **numbers)


# name -> (how to call it with numbers only, numbers that are fine)
VALID = {
    "AllocatedGuarantee": (
        lambda **numbers: accounting.AllocatedGuarantee(sampling=BINS, **numbers),
        {"noise_multiplier": 4.0},
    ),
    "AllocatedGuarantee.delta": (
        accounting.AllocatedGuarantee(4.0, BINS).delta,
        {"epsilon": 1.0},
    ),
    "AllocatedGuarantee.epsilon": (
        accounting.AllocatedGuarantee(4.0, BINS).epsilon,
        {"delta": 1e-6},
    ),
    "BMinSep": (
        accounting.BMinSep,
        {"expected_batch": 1.0, "population": 8, "min_separation": 4},
    ),
    "BallsInBins": (accounting.BallsInBins, {"bins": 8, "rounds": 8}),
    "BandedInverse": (
        lambda **numbers: accounting.BandedInverse(coefficients=(1.0, -0.5), **numbers),
        {"rounds": 8},
    ),
    "BandedInverse.from_options": (
        lambda **numbers: accounting.BandedInverse.from_options(Participation(8), **numbers),
        {"bands": 2},
    ),
    "BandedInverse.square_root": (
        accounting.BandedInverse.square_root,
        {"rounds": 8, "bands": 2},
    ),
    "BinaryTree": (BinaryTree, {"rounds": 8, "restart_every": 4}),
    "BinaryTree.from_options": (
        lambda **numbers: BinaryTree.from_options(Participation(8), **numbers),
        {"restart_every": 4},
    ),
    "BufferedToeplitz": (
        lambda **numbers: accounting.BufferedToeplitz(decay=(0.9,), scale=(0.2,), **numbers),
        {"rounds": 8},
    ),
    "BufferedToeplitz.from_options": (
        lambda **numbers: accounting.BufferedToeplitz.from_options(Participation(8), **numbers),
        {"buffers": 1},
    ),
    "CrossCheck": (
        lambda **numbers: CrossCheck("pld", consistent=True, **numbers),
        {"epsilon": 1.0, "agree_to": 0.1},
    ),
    # takes lists; tried in test_grouped.py
    "EstimatedGuarantee": (
        lambda **numbers: accounting.EstimatedGuarantee(
            sampling=BINS, mechanism=Independent(8), **numbers
        ),
        {"noise_multiplier": 4.0, "samples": 10_000, "seed": 0},
    ),
    "EstimatedGuarantee.epsilon": (
        accounting.EstimatedGuarantee(4.0, BINS, Independent(8), 10_000).epsilon,
        {"delta": 1e-6},
    ),
    "EstimatedGuarantee.failure": (
        accounting.EstimatedGuarantee(4.0, BINS, Independent(8), 10_000).failure,
        {"delta": 1e-6},
    ),
    "FixedOrder": (
        accounting.FixedOrder,
        {"rounds": 8, "max_participations": 2, "min_separation": 2},
    ),
    "Guarantee": (Guarantee, {"mu": 1.0}),
    "Guarantee.cross_check": (Guarantee(1.0).cross_check, {"delta": 1e-6}),
    "Guarantee.delta": (Guarantee(1.0).delta, {"epsilon": 1.0}),
    "Guarantee.epsilon": (Guarantee(1.0).epsilon, {"delta": 1e-6}),
    "Guarantee.tpr_at_fpr": (Guarantee(1.0).tpr_at_fpr, {"fpr": 0.1}),
    "Independent": (Independent, {"rounds": 8}),
    "Participation": (
        Participation,
        {"rounds": 8, "max_participations": 2, "min_separation": 2},
    ),
    "Participation.from_log": (
        lambda **numbers: Participation.from_log(rounds_by_client={0: [1]}, **numbers),
        {"rounds": 8},
    ),
    "Participation.from_tf_privacy": (
        Participation.from_tf_privacy,
        {"rounds": 8, "max_participations": 2, "min_separation": 2},
    ),
    "PoissonSampling": (PoissonSampling, {"expected_batch": 10.0, "population": 1000, "groups": 2}),
    "PrefixError": (accounting.PrefixError, {"rmse": 1.0, "max_error": 2.0}),
    "PrivacyReport.of": (
        on_run(PrivacyReport.of),
        {"noise_multiplier": 4.0, "delta": 1e-6, "population": 1000},
    ),
    "PrunedTree": (lambda **numbers: accounting.PrunedTree(active=(0,), **numbers), {"span": 8}),
    "PrunedTree.prefix_nodes": (accounting.PrunedTree(8, (0, 2)).prefix_nodes, {"step": 1}),
    "Realised.of": (
        lambda **numbers: accounting.Realised.of(RUN[0], {"ada": [0, 9]}, RUN[1], **numbers),
        {"noise_multiplier": 1.0, "delta": 1e-6},
    ),
    "SampledGuarantee": (
        SampledGuarantee,
        {"noise_multiplier": 1.0, "probability": 0.1, "steps": 10, "groups": 1},
    ),
    "SampledGuarantee.delta": (SampledGuarantee(1.0, 0.1, 10, "rdp").delta, {"epsilon": 1.0}),
    "SampledGuarantee.epsilon": (SampledGuarantee(1.0, 0.1, 10, "rdp").epsilon, {"delta": 1e-6}),
    "Sensitivity": (
        lambda **numbers: Sensitivity(exact=True, rule="", **numbers),
        {"squared": 1.0},
    ),
    "Toeplitz": (
        lambda **numbers: accounting.Toeplitz(coefficients=(1.0, 0.5), **numbers),
        {"rounds": 8},
    ),
    "Toeplitz.from_options": (
        lambda **numbers: accounting.Toeplitz.from_options(Participation(8), **numbers),
        {"bands": 2},
    ),
    "Toeplitz.square_root": (accounting.Toeplitz.square_root, {"rounds": 8, "bands": 2}),
    "Estimate": (accounting.Estimate, {"draws": 10_000, "seed": 1}),
    "participation_of": (
        lambda **numbers: accounting.participation_of(SAMPLING, **numbers),
        {"rounds": 8},
    ),
    "sampled_guarantee": (
        lambda **numbers: accounting.sampled_guarantee(Independent(8), SAMPLING, **numbers),
        {"noise_multiplier": 2.0},
    ),
    "calibrate": (on_run(accounting.calibrate), {"target_epsilon": 1.0, "delta": 1e-6}),
    "guarantee": (on_run(accounting.guarantee), {"noise_multiplier": 1.0}),
    "cohorts": (
        lambda **numbers: accounting.cohorts(
            accounting.PoissonSampling(1, 5), key=bytes(32), **numbers
        ),
        {"members": 5, "rounds": 8},
    ),
    "optimize": (
        lambda *, buffers, bands: (
            accounting.optimize("blt", Participation(4), buffers=buffers),
            accounting.optimize("toeplitz", Participation(4), bands=bands),
        ),
        {"buffers": 2, "bands": 3},
    ),
}
NOT_CALLED = {"ConfigError", "Mechanism"}  # an exception and a protocol

MAY_BE_ZERO = {
    ("PrunedTree.prefix_nodes", "step"), ("EstimatedGuarantee", "seed"),
    ("Estimate", "seed"),
    ("AllocatedGuarantee.delta", "epsilon"),
    ("Guarantee.delta", "epsilon"), ("SampledGuarantee.delta", "epsilon"),
    ("CrossCheck", "epsilon"), ("CrossCheck", "agree_to"),
    ("Participation.from_tf_privacy", "min_separation"),
}  # fmt: skip
NONSENSE = [math.nan, math.inf, -math.inf, -1, -1e-9, "1", True, None, 0, 1.5, 1e301, [1.0], 1j]
WHOLE = (int, int | None)
NUMBERS = (*WHOLE, float, float | None)


def public():
    """Every exported function, class and public method that takes an argument."""
    for name in accounting.__all__:
        if name in NOT_CALLED:
            continue
        thing = getattr(accounting, name)
        yield name, thing
        if inspect.isclass(thing):
            exported = [getattr(accounting, other) for other in accounting.__all__]
            bases = [base for base in thing.__mro__[1:-1] if base not in exported]
            members = {k: v for kind in (*bases, thing) for k, v in vars(kind).items()}
            for method, member in members.items():
                callable_one = isinstance(member, classmethod) or inspect.isfunction(member)
                if callable_one and not method.startswith("_"):
                    bound = getattr(thing, method)
                    if set(inspect.signature(bound).parameters) - {"self"}:
                        yield f"{name}.{method}", bound


PUBLIC = dict(public())


def numbers_of(function):
    parameters = inspect.signature(function).parameters.values()
    if function in (accounting.Footprint, PrivacyReport, accounting.Realised):  # results
        return {}
    return {p.name: p.annotation for p in parameters if p.annotation in NUMBERS}


def test_every_public_name_that_takes_a_number_has_an_entry():
    assert set(VALID) == {name for name, thing in PUBLIC.items() if numbers_of(thing)}


@pytest.mark.parametrize("name", sorted(VALID))
def test_every_number_is_named(name):
    _, valid = VALID[name]
    assert set(valid) == set(numbers_of(PUBLIC[name]))


@pytest.mark.parametrize("name", sorted(VALID))
def test_what_is_fine_is_fine(name):
    call, valid = VALID[name]
    call(**valid)


def cases():
    for name, (call, valid) in VALID.items():
        for argument in valid:
            kind = numbers_of(PUBLIC[name])[argument]
            for value in NONSENSE:
                fine = (
                    (value is None and kind in (int | None, float | None))
                    or (value == 0 and value is not True and (name, argument) in MAY_BE_ZERO)
                    or (value in (1.5, 1e301) and kind not in WHOLE)
                )
                if not fine:
                    yield pytest.param(
                        call, valid, argument, value, id=f"{name}-{argument}-{value}"
                    )


@pytest.mark.parametrize(("call", "valid", "argument", "value"), list(cases()))
def test_nonsense_never_becomes_a_number(call, valid, argument, value):
    with pytest.raises(ConfigError, match=rf"\b{argument}="):
        call(**valid | {argument: value})


UNSOUND_ARRAYS = {
    "matrix": lambda bad: accounting.Dense([[1.0, 0.0], [bad, 1.0]]),
    "coefficients": lambda bad: accounting.Toeplitz(3, (1.0, bad)),
    "coefficients of noise": lambda bad: accounting.BandedInverse(3, (1.0, bad)),
    "decay": lambda bad: accounting.BufferedToeplitz(3, (bad,), (0.2,)),
    "scale": lambda bad: accounting.BufferedToeplitz(3, (0.9,), (bad,)),
    "encoder": lambda bad: accounting.brute_force(np.array([[bad]]), Participation(1)),
}


@pytest.mark.parametrize("argument", UNSOUND_ARRAYS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonsense_inside_an_array_is_found(argument, value):
    with pytest.raises(ConfigError, match=argument.partition(" ")[0]):
        UNSOUND_ARRAYS[argument](value)


@pytest.mark.parametrize("name", sorted(VALID))
@pytest.mark.parametrize("value", [1e301, 1e-301])
def test_extremes_are_refused_or_accounted_for(name, value):
    """Beyond what is sensible, a ConfigError or a figure that is not NaN; nothing else."""
    call, valid = VALID[name]
    for argument, kind in numbers_of(PUBLIC[name]).items():
        if kind in (float, float | None):
            try:
                found = call(**valid | {argument: value})
            except ConfigError:
                continue
            if isinstance(found, float):
                assert found >= 0


@pytest.mark.parametrize("name", sorted(VALID))
@pytest.mark.parametrize(
    "value", [10**30, 10**100, 10**5000, -(10**5000)], ids=["1e30", "1e100", "1e5000", "-1e5000"]
)
def test_huge_whole_numbers_are_refused_or_accounted_for(name, value):
    """Neither overflow, nor a wait without an end, nor digits that Python does not print."""
    call, valid = VALID[name]
    for argument, kind in numbers_of(PUBLIC[name]).items():
        if kind in WHOLE:
            try:
                found = call(**valid | {argument: value})
            except ConfigError:
                continue
            assert abs(value) <= 10**100
            if isinstance(found, float):
                assert found >= 0


ROUNDS = [
    (name, argument)
    for name, (_, valid) in VALID.items()
    for argument in valid
    if argument in ("rounds", "span", "at_most", "steps")
]


def test_the_census_of_rounds_finds_them():
    assert len(ROUNDS) == 16


@pytest.mark.parametrize(("name", "argument"), ROUNDS)
@pytest.mark.parametrize("value", [10**6 + 1, 10**30, 10**5000], ids=["1e6+1", "1e30", "1e5000"])
def test_more_rounds_than_can_be_computed_are_refused(name, argument, value):
    call, valid = VALID[name]
    with pytest.raises(ConfigError, match=rf"^{argument}=.*: must be at most 1000000\."):
        call(**valid | {argument: value})


@pytest.mark.parametrize("mechanism", [BinaryTree, Independent, accounting.Toeplitz.square_root])
def test_as_many_rounds_as_are_allowed_can_be_computed(mechanism):
    run = Participation(10**6, 3, 10**5)
    assert 0 < accounting.calibrate(mechanism(10**6), run, target_epsilon=2.0, delta=1e-6) < 100


@pytest.mark.parametrize(
    ("kind", "rounds", "most"),
    [("toeplitz", 32_769, 32_768), ("dense", 4097, 4096)],
)
def test_fits_that_would_take_hours_are_refused(kind, rounds, most):
    with pytest.raises(ConfigError, match=rf"^rounds={rounds}: must be at most {most}\. That is"):
        accounting.optimize(kind, Participation(rounds))
