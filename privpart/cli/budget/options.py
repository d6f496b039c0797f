"""Options of the budget commands: the mechanism, the sampler, and how often a client takes part."""

from pathlib import Path
from typing import Annotated

import typer

from accounting import ConfigError, FixedOrder, Participation
from accounting.mechanisms.by_name import MechanismChoice, MechanismName, options_by_name
from accounting.mechanisms.scheduled import read_schedule
from privpart.cli.idle import beside

TYPED_MECHANISM = (
    "with options as in a plan's table: 'tree:restart_every=64', 'blt:buffers=2', "
    "'toeplitz:bands=8,fit', 'toeplitz:coefficients=1,0.5'; or 'file:PATH', which holds the JSON "
    "of --format json. Names and options: "
    + "; ".join(
        f"{name} ({', '.join(options)})" if options else name
        for name, options in options_by_name().items()
        if name != "file"
    )
    + "."
)
"""How a mechanism is typed, for help."""
DEFAULT_MECHANISM = "tree"

_OF_SAMPLING = beside("sampling", "decides who takes part, and how often")

MechanismOption = Annotated[
    str | None,
    typer.Option(
        "--mechanism",
        help=f"What correlates the noise over the rounds, by default a tree, {TYPED_MECHANISM}",
    ),
    beside("noise_schedule", "is of independent noise"),
]
NoiseScheduleOption = Annotated[
    Path | None,
    typer.Option(
        "--noise-schedule",
        help="Independent noise that changes: a CSV file with the columns from_round and factor. "
        "From that round on, the first is 0, the noise is factor times --noise-multiplier.",
        show_default=False,
    ),
]
SamplingOption = Annotated[
    str | None,
    typer.Option(
        "--sampling",
        help="Amplify by hiding who takes part, under add-or-remove adjacency. "
        "'poisson:expected_batch=20': each member of --population joins a round on its own. "
        "'scheduled-poisson:from_round=0,100,expected_batches=20,40': its rate changes by round. "
        "'poisson-examples:expected_batch=512,examples=60000,per_user=8': each example joins on "
        "its own, and a client, the unit, has up to 8; noise is / clip norm of an example. "
        "'truncated-poisson:expected_batch=20,most=32': of more than 32, a random 32 stay. "
        "'without-replacement:batch=20': a random 20 of --population in every round; "
        "'with-replacement:batch=20': each of 20 places on its own. "
        "'balls-in-bins:bins=8': each member is in one bin, and the rounds take the bins in turn; "
        "with 'chosen=3' each is in 3 of them, with 'redraw' every pass draws them anew. "
        "'b-min-sep:expected_batch=20,min_separation=4': each member joins on its own, but never "
        "within so many rounds of its last one; with 'most=32' a random 32 of more stay. "
        "'draws=1000000' estimates by Monte Carlo, which "
        "b-min-sep always does; the probability of error is part of delta. 'draw_seed=N' repeats a "
        "printed figure; the probability of error holds for a fresh seed, the default, alone.",
    ),
]
MaxParticipations = Annotated[
    int | None,
    typer.Option(
        help="Most rounds in which one client takes part. Without it, 1, and a warning: nothing "
        "here enforces it."
    ),
    _OF_SAMPLING,
]
MinSeparation = Annotated[
    int | None,
    typer.Option(
        help="Least distance |i - j| between two of a client's rounds; 1, the default, allows "
        "consecutive ones."
    ),
    _OF_SAMPLING,
]
FixedOrderOption = Annotated[
    bool,
    typer.Option(
        "--fixed-order",
        help="Every pass takes --min-separation rounds, in one public order: a client's rounds "
        "are multiples of that apart.",
    ),
    _OF_SAMPLING,
]


def typed_participation(
    rounds: int, max_participations: int | None, min_separation: int | None, fixed_order: bool
) -> Participation:
    """Return the participation that was typed; one round of each client if nothing was.

    Raises:
        ConfigError: a separation of nothing, or limits that do not fit.
    """
    k, b = max_participations, min_separation
    if fixed_order:
        if k is None or b is None:
            raise ConfigError(
                "fixed_order=True: needs the number of passes, --max-participations, and the "
                "rounds of a pass, --min-separation."
            )
        return FixedOrder(rounds, k, b)
    if b is not None and k in (None, 1):
        raise ConfigError(
            f"min_separation={b}: is between two rounds of one client; say "
            "--max-participations of 2 or more, or leave it out."
        )
    return Participation(rounds, 1 if k is None else k, 1 if b is None else b)


def typed_choice(
    mechanism: str | None, rounds: int, schedule: Path | None = None
) -> MechanismChoice:
    """Return the mechanism that was typed for so many rounds, or the default."""
    if schedule is not None:
        starts, factors = read_schedule(schedule)
        name = MechanismName("scheduled")
        return MechanismChoice(name=name, from_round=starts, factor=factors)
    choice = MechanismChoice.parse(mechanism or DEFAULT_MECHANISM)
    choice.refuse_late_restart(rounds)
    return choice
