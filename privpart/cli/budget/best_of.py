"""What it costs to release the best of several such runs, beside counting all of them."""

import math
from typing import Annotated, Any

import typer

from accounting import (
    ComposedGuarantee,
    ConfigError,
    EstimatedGuarantee,
    Guarantee,
    SelectedGuarantee,
)
from accounting.claims import releases_of
from accounting.cohorts import Sampled
from accounting.report import up
from accounting.selection import Base, quantile, repetitions_of
from privpart.cli.idle import Idle, beside

_OF_ONE_RUN = "states the cost of one run, not of the best of several; table and json state both"
BestOf = Annotated[
    str | None,
    typer.Option(
        help="Also the cost of releasing only the best of K such runs, K secret, instead of one. "
        "'10' draws K with mean 10 from a geometric distribution. Others: "
        "'negative-binomial:expected=10,eta=0' (a smaller eta costs less, and K has a longer "
        "tail), 'poisson:expected=10', 'binomial:expected=3,most=5'."
    ),
    beside("html", _OF_ONE_RUN),
    Idle("form", lambda values: values["form"] not in ("table", "json"), _OF_ONE_RUN),
]
_SHARE = 0.95


def selected(run: Guarantee | Sampled, text: str, delta: float) -> dict[str, Any]:
    """Return what a selection among such runs costs at ``delta``, ready for JSON."""
    repetitions = repetitions_of(text)
    counted = math.ceil(repetitions.expected)
    if isinstance(run, Guarantee):
        base: Base = run
        all_runs = Guarantee(run.mu * math.sqrt(counted)).epsilon(delta)
    elif isinstance(run, EstimatedGuarantee):
        raise ConfigError(
            f"best_of={text}: needs the whole trade-off of one run, and this sampler's accountant "
            "has none. Use Poisson sampling, bins without draws, or no sampling."
        )
    else:
        releases = releases_of(run)
        base = ComposedGuarantee(releases)
        all_runs = ComposedGuarantee(releases * counted).epsilon(delta)
    return {
        "runs": text,
        "expected_runs": repetitions.expected,
        "runs_95_percent": quantile(repetitions, _SHARE),
        "epsilon": SelectedGuarantee(base, repetitions).epsilon(delta),
        "epsilon_of_counting_all": all_runs,
        "counted": counted,
        "delta": delta,
    }


def lines_of(selection: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of a report's text form."""
    best, all_runs = (up(selection[key], 5) for key in ("epsilon", "epsilon_of_counting_all"))
    often = f"{selection['expected_runs']:g} on average, at most {selection['runs_95_percent']}"
    what = f"to release the best run and nothing else of them, {often} in 95 % of all cases"
    return [
        ("best of K", f"epsilon {best} {what}"),
        ("counting all", f"epsilon {all_runs} to release all of {selection['counted']} runs"),
    ]
