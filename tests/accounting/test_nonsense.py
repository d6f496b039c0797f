"""No public function makes a number out of NaN, infinity or a value out of range.

Every name that ``accounting`` exports, and every public method of its classes, is called with
each number that it takes: a new argument needs a number in ``FINE``, a new function what else it
takes in ``CALLS``.
"""

import inspect
import math
import re
from functools import partial

import numpy as np
import pytest

import accounting
from accounting import BinaryTree, ConfigError, Independent, Participation, PoissonSampling

RUN = BinaryTree(64), Participation(64)
SAMPLING = PoissonSampling(10, 1000)
BINS = accounting.BallsInBins(8, 8)
RUNS = accounting.NegativeBinomialRuns(3)
OBJECTS = {
    "AllocatedGuarantee": accounting.AllocatedGuarantee(4.0, BINS),
    "EstimatedGuarantee": accounting.EstimatedGuarantee(4.0, BINS, Independent(8), 10_000),
    "BMinSep": accounting.BMinSep(10, 1000, 2, most=40),
    "ComposedGuarantee": accounting.ComposedGuarantee(
        (accounting.Guarantee(1.0), accounting.StatedGuarantee(0.1))
    ),
    "Guarantee": accounting.Guarantee(1.0),
    "PrunedTree": accounting.PrunedTree(8, (0, 2)),
    "ReplacedGuarantee": accounting.ReplacedGuarantee(4.0, 8, 1000, 2),
    "ScheduledGuarantee": accounting.ScheduledGuarantee(
        (accounting.SampledGuarantee(2.0, 0.1, 4), accounting.SampledGuarantee(4.0, 0.2, 4))
    ),
    "ScheduledPoissonSampling": accounting.ScheduledPoissonSampling((0, 2), (10, 20), 1000),
    "UserGuarantee": accounting.UserGuarantee(4.0, 0.1, 2, 2),
    "TruncatedGuarantee": accounting.TruncatedGuarantee(2.0, 0.1, 100, 20, 2),
    "SampledGuarantee": accounting.SampledGuarantee(1.0, 0.1, 10, "rdp"),
    "SelectedGuarantee": accounting.SelectedGuarantee(accounting.Guarantee(1.0), RUNS, 0.2),
}
"""What methods are called of."""


def fits(*, buffers, bands):
    accounting.optimize("blt", Participation(4), buffers=buffers)
    accounting.optimize("toeplitz", Participation(4), bands=bands)


CALLS = {
    "AllocatedGuarantee": partial(accounting.AllocatedGuarantee, sampling=BINS),
    "BandedInverse": partial(accounting.BandedInverse, coefficients=(1.0, -0.5)),
    "BufferedToeplitz": partial(accounting.BufferedToeplitz, decay=(0.9,), scale=(0.2,)),
    "CrossCheck": partial(accounting.CrossCheck, "pld", consistent=True),
    "EstimatedGuarantee": partial(
        accounting.EstimatedGuarantee, sampling=BINS, mechanism=Independent(8)
    ),
    "Participation.from_log": partial(Participation.from_log, rounds_by_client={0: [1]}),
    "PrivacyReport.of": partial(accounting.PrivacyReport.of, *RUN),
    "PrivacyReport.selected": partial(
        accounting.PrivacyReport.of(*RUN, noise_multiplier=4.0, delta=1e-6).selected,
        accounting.SelectedGuarantee(accounting.Guarantee(1.0), RUNS),
    ),
    "PrunedTree": partial(accounting.PrunedTree, active=(0,)),
    "ScheduledPoissonSampling": partial(
        accounting.ScheduledPoissonSampling, from_round=(0,), expected_batches=(10.0,)
    ),
    "Scheduled": partial(accounting.Scheduled, from_round=(0,), factor=(1.0,)),
    "Realised.of": partial(accounting.Realised.of, RUN[0], {"ada": [0, 9]}, RUN[1]),
    "SelectedGuarantee": partial(
        accounting.SelectedGuarantee, accounting.Guarantee(1.0), repetitions=RUNS
    ),
    "Sensitivity": partial(accounting.Sensitivity, exact=True, rule=""),
    "Toeplitz": partial(accounting.Toeplitz, coefficients=(1.0, 0.5)),
    "calibrate": partial(accounting.calibrate, *RUN),
    "cohorts": partial(accounting.cohorts, SAMPLING, key=bytes(32)),
    "guarantee": partial(accounting.guarantee, *RUN),
    "most_mu": partial(accounting.most_mu, RUNS),
    "optimize": fits,
    "participation_of": partial(accounting.participation_of, SAMPLING),
    "sampled_guarantee": partial(accounting.sampled_guarantee, Independent(8), SAMPLING),
}
"""How to call, with numbers only, what takes more than numbers."""
FINE = {
    "rounds": 8, "max_participations": 2, "min_separation": 2, "restart_every": 4, "bands": 2,
    "buffers": 1, "span": 8, "step": 1, "noise_multiplier": 4.0, "delta": 1e-6, "epsilon": 1.0,
    "target_epsilon": 1.0, "mu": 1.0, "fpr": 0.1, "agree_to": 0.1, "squared": 1.0, "rmse": 1.0,
    "max_error": 2.0, "expected_batch": 10.0, "population": 1000, "members": 1000, "groups": 2,
    "probability": 0.1, "steps": 10, "bins": 8, "chosen": 2,
    "examples": 1000, "per_user": 2, "samples": 10_000, "batch": 8,
    "draws": 10_000, "seed": 0, "momentum": 0.9, "candidates": 4,
    "expected": 4.0, "most": 8, "eta": 1.0, "fineness": 0.2,
}  # fmt: skip
NOT_CALLED = {"ConfigError", "Mechanism"}  # an exception and a protocol

MAY_BE_ZERO = {
    ("PrunedTree.prefix_nodes", "step"), ("EstimatedGuarantee", "seed"),
    ("Estimate", "seed"),
    ("AllocatedGuarantee.delta", "epsilon"),
    ("Guarantee.delta", "epsilon"), ("SampledGuarantee.delta", "epsilon"),
    ("ScheduledGuarantee.delta", "epsilon"), ("TruncatedGuarantee.delta", "epsilon"),
    ("UserGuarantee.delta", "epsilon"),
    ("ReplacedGuarantee.delta", "epsilon"),
    ("ComposedGuarantee.delta", "epsilon"), ("SelectedGuarantee.delta", "epsilon"),
    ("StatedGuarantee", "epsilon"), ("StatedGuarantee", "delta"), ("NegativeBinomialRuns", "eta"),
    ("CrossCheck", "epsilon"), ("CrossCheck", "agree_to"),
    ("Participation.from_tf_privacy", "min_separation"),
    ("Workload", "momentum"), ("Toeplitz.from_options", "momentum"),
    ("BandedInverse.from_options", "momentum"), ("BufferedToeplitz.from_options", "momentum"),
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
                if callable_one and method.isascii() and not method.startswith("_"):  # no mutant
                    bound = getattr(thing, method)
                    if set(inspect.signature(bound).parameters) - {"self"}:
                        yield f"{name}.{method}", bound


PUBLIC = dict(public())


def numbers_of(function):
    parameters = inspect.signature(function).parameters.values()
    results = accounting.Footprint, accounting.PrivacyReport, accounting.Realised
    if function in results:
        return {}
    return {p.name: p.annotation for p in parameters if p.annotation in NUMBERS}


def called(name):
    kind, _, method = name.partition(".")
    if name not in CALLS and kind in OBJECTS and method:
        return getattr(OBJECTS[kind], method)
    if method == "from_options":
        fit = {"fit": True} if "fit" in inspect.signature(PUBLIC[name]).parameters else {}
        return partial(PUBLIC[name], Participation(8), **fit)
    return CALLS.get(name, PUBLIC[name])


VALID = {
    name: (called(name), {argument: FINE[argument] for argument in numbers_of(function)})
    for name, function in PUBLIC.items()
    if numbers_of(function)
}


@pytest.mark.parametrize("name", sorted(VALID))
def test_what_is_fine_is_fine(name):
    call, valid = VALID[name]
    call(**valid)


def nonsense_of(name):
    """Yield arguments of a public function with values that it must refuse."""
    for argument, kind in numbers_of(PUBLIC[name]).items():
        for value in NONSENSE:
            fine = (
                (value is None and kind in (int | None, float | None))
                or (value == 0 and value is not True and (name, argument) in MAY_BE_ZERO)
                or (value == -1e-9 and argument == "eta")
                or (value in (1.5, 1e301) and kind not in WHOLE)
            )
            if not fine:
                yield argument, value


def answer(call, arguments):
    try:
        return f"accepted: {call(**arguments)}"
    except ConfigError as refusal:
        return str(refusal)


@pytest.mark.parametrize("name", sorted(VALID))
def test_nonsense_never_becomes_a_number(name):
    call, valid = VALID[name]
    answers = [(a, v, answer(call, valid | {a: v})) for a, v in nonsense_of(name)]
    assert len(answers) >= len(NONSENSE) - 4
    assert not [case for case in answers if not re.search(rf"\b{case[0]}=", case[2])]


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


HUGE = [10**30, 10**100, 10**5000, -(10**5000)]
EXTREMES = [((float, float | None), [1e301, 1e-301]), (WHOLE, HUGE)]


@pytest.mark.parametrize("name", sorted(VALID))
def test_extremes_are_refused_or_accounted_for(name):
    """A ConfigError or a figure; neither NaN, overflow, nor digits that Python does not print."""
    call, valid = VALID[name]
    kinds_of = numbers_of(PUBLIC[name])
    for argument, value in (
        (argument, value)
        for kinds, values in EXTREMES
        for argument, kind in kinds_of.items()
        if kind in kinds
        for value in values
    ):
        try:
            found = call(**valid | {argument: value})
        except ConfigError:
            continue
        assert isinstance(value, float) or abs(value) <= 10**100
        if isinstance(found, float):
            assert found >= 0


ROUNDS = [
    (name, argument)
    for name, (_, valid) in VALID.items()
    for argument in valid
    if argument in ("rounds", "span", "at_most", "steps")
]


def test_the_census_of_rounds_finds_them():
    assert len(ROUNDS) == 22


@pytest.mark.parametrize(("name", "argument"), ROUNDS)
def test_more_rounds_than_can_be_computed_are_refused(name, argument):
    call, valid = VALID[name]
    for value in (10**6 + 1, 10**30, 10**5000):
        with pytest.raises(ConfigError, match=rf"^{argument}=.*: must be at most 1000000\."):
            call(**valid | {argument: value})


@pytest.mark.parametrize("mechanism", [BinaryTree, Independent, accounting.Toeplitz.square_root])
def test_as_many_rounds_as_are_allowed_can_be_computed(mechanism):
    run = Participation(10**6, 3, 10**5)
    assert 0 < accounting.calibrate(mechanism(10**6), run, target_epsilon=2.0, delta=1e-6) < 100


@pytest.mark.parametrize(
    ("kind", "rounds", "most"), [("toeplitz", 32_769, 32_768), ("dense", 4097, 4096)]
)
def test_fits_that_would_take_hours_are_refused(kind, rounds, most):
    with pytest.raises(ConfigError, match=rf"^rounds={rounds}: must be at most {most}\. That is"):
        accounting.optimize(kind, Participation(rounds))
