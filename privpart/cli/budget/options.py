"""Options of the budget commands: the mechanism, and how often a client takes part.

A command that has a parameter ``choice`` or ``limits`` gets these options in its place.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import ConfigError, FixedOrder, Participation, checks
from accounting.mechanisms.by_name import MechanismChoice, MechanismName
from accounting.mechanisms.toeplitz import ObjectiveName
from accounting.mechanisms.tree import EstimatorName, ReleaseName
from privpart.cli.idle import OF_A_PLAN, Idle, Values, beside, typed, where

if TYPE_CHECKING:  # imported where used: it needs torch
    from privpart.training.plan_file import PlanFile

_TREE = "Trees"
_FILTER = "Toeplitz, BLT and banded inverses"
_FILE = MechanismName("file")


def _hides_the_own_row(values: Values) -> bool:
    """Whether --only leaves out the row of the typed mechanism."""
    row = f"{'file' if values['mechanism_file'] else values['mechanism']}, as given"
    return values["only"] is not None and values["only"] not in row


_OF_A_MECHANISM = (
    OF_A_PLAN,
    Idle("only", _hides_the_own_row, "leaves out the row of this mechanism"),
)
_SAMPLED = beside("sampling", "decides who takes part")
_OF_LIMITS = (OF_A_PLAN, _SAMPLED)
_IN_ANY_ORDER = Idle(
    "solve", lambda values: values["solve"] != "noise-multiplier", "is for clients in any order"
)
_APART = Idle(
    "sampling",
    lambda values: values["sampling"] in ("poisson", "balls-in-bins"),
    "decides itself how far a member's rounds are apart",
)


def _solved(name: str) -> Idle:
    return where("solve", name, "finds this")


DEFAULT_MECHANISM = MechanismChoice(name=MechanismName("tree"))


@dataclass(frozen=True, slots=True)
class Limits:
    """How often a client takes part, as typed; None where nothing was typed."""

    max_participations: int | None
    min_separation: int | None
    fixed_order: bool

    @property
    def stated(self) -> bool:
        """Whether somebody said how often a client takes part."""
        return self.max_participations is not None

    def of(self, rounds: int) -> Participation:
        """Return the participation; one round of each client if nothing was typed.

        Raises:
            ConfigError: a separation of nothing, or limits that do not fit.
        """
        k, b = self.max_participations, self.min_separation
        if b is not None and (k is None or k == 1) and not self.fixed_order:
            raise ConfigError(
                f"min_separation={b}: is between two rounds of one client; say "
                "--max-participations of 2 or more, or leave it out."
            )
        if not self.fixed_order:
            return Participation(rounds, 1 if k is None else k, 1 if b is None else b)
        if k is None or b is None:
            raise ConfigError(
                "fixed_order=True: needs the number of passes, --max-participations, and the "
                "rounds of a pass, --min-separation."
            )
        return FixedOrder(rounds, k, b)


def accept_planned_delta(
    plan: "PlanFile", delta: float | None, population: int | None, *, allow_large: bool
) -> int | None:
    """Return the number of clients that the delta was accepted for; None if nobody said it.

    Args:
        plan: what ``--plan`` names.
        delta: what was typed in place of the plan's, if it was.
        population: what was typed, if it was.
        allow_large: whether --allow-large-delta was typed.

    Raises:
        ConfigError: a large delta that was not allowed, or another population than the plan's.
    """
    stated = plan.stated_population
    if None not in (stated, population) and stated != population:
        raise ConfigError(f"population={population}: the plan is for {stated} clients.")
    if delta is not None:
        checks.accept_delta(delta, stated or population, allow_large=allow_large)
    elif allow_large:
        raise ConfigError(
            "allow_large_delta=True: is for a delta that is typed; a plan has a key of that name "
            "for its own. Leave it out, or pass --delta."
        )
    else:
        plan.accept_delta(population)
    return stated or population


def mechanism_choice(
    mechanism: Annotated[
        MechanismName,
        typer.Option(
            help="What correlates the noise over the rounds. 'toeplitz' is the square-root matrix, "
            "'banded-inverse' needs no memory, 'blt' and 'bandmf' are fitted to the participation "
            "for the least root mean squared error.",
        ),
        _OF_A_MECHANISM,
    ] = DEFAULT_MECHANISM.name,
    mechanism_file: Annotated[
        Path | None,
        typer.Option(
            help="The mechanism in a file: JSON, as --format json prints it, or a dense encoder "
            "as .npy."
        ),
        _OF_A_MECHANISM,
    ] = None,
    restart_every: Annotated[
        int | None,
        typer.Option(
            help="Rounds per tree; by default one tree spans all rounds.", rich_help_panel=_TREE
        ),
        _OF_A_MECHANISM,
    ] = None,
    estimator: Annotated[
        EstimatorName,
        typer.Option(
            help="'online' (Honaker) has less noise at the same cost.", rich_help_panel=_TREE
        ),
        _OF_A_MECHANISM,
    ] = EstimatorName.VANILLA,
    completed: Annotated[
        bool,
        typer.Option(
            "--completed", help="Complete each tree before a restart.", rich_help_panel=_TREE
        ),
        _OF_A_MECHANISM,
    ] = False,
    release: Annotated[
        ReleaseName,
        typer.Option(
            help="'prefix' accounts for the models only: no node, virtual round or noise state may "
            "ever leave the server.",
            rich_help_panel=_TREE,
        ),
        _OF_A_MECHANISM,
    ] = ReleaseName.NODES,
    bands: Annotated[
        int | None,
        typer.Option(
            help="Diagonals of 'toeplitz', by default all; draws per round of 'banded-inverse'.",
            rich_help_panel=_FILTER,
        ),
        _OF_A_MECHANISM,
    ] = None,
    coefficients: Annotated[
        str | None,
        typer.Option(
            help="First column of the encoder of 'toeplitz', or of the noise matrix of "
            "'banded-inverse', as 1,0.5,0.375. (1,-L with --normalize-columns is "
            "DP-lambda-CGD.)",
            rich_help_panel=_FILTER,
        ),
        _OF_A_MECHANISM,
    ] = None,
    normalize_columns: Annotated[
        bool,
        typer.Option(
            "--normalize-columns",
            help="Divide each column of the encoder of 'toeplitz' or 'banded-inverse' by its norm.",
            rich_help_panel=_FILTER,
        ),
        _OF_A_MECHANISM,
    ] = False,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="Fit the coefficients to the participation: with 'toeplitz', --bands and "
            "--normalize-columns this is BandMF.",
            rich_help_panel=_FILTER,
        ),
        _OF_A_MECHANISM,
    ] = False,
    objective: Annotated[
        ObjectiveName | None,
        typer.Option(
            help="What a fit minimises: the root mean squared error of the prefix sums (default), "
            "or the largest.",
            rich_help_panel=_FILTER,
        ),
        _OF_A_MECHANISM,
    ] = None,
    buffers: Annotated[
        int | None,
        typer.Option(
            help="Buffers of a fitted 'blt', 1 to 5; by default 3.", rich_help_panel=_FILTER
        ),
        _OF_A_MECHANISM,
    ] = None,
    decay: Annotated[
        str | None,
        typer.Option(help="Decays of 'blt', as 0.9,0.99.", rich_help_panel=_FILTER),
        _OF_A_MECHANISM,
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="Scales of 'blt', one per decay.", rich_help_panel=_FILTER),
        _OF_A_MECHANISM,
    ] = None,
) -> MechanismChoice:
    """Return the mechanism that the options describe."""
    return MechanismChoice(
        name=mechanism if mechanism_file is None else _FILE,
        restart_every=restart_every,
        estimator=estimator,
        completed=completed,
        release=release,
        bands=bands,
        coefficients=_numbers("coefficients", coefficients),
        normalize_columns=normalize_columns,
        fit=fit,
        objective=objective,
        buffers=buffers,
        decay=_numbers("decay", decay),
        scale=_numbers("scale", scale),
        file=mechanism_file,
    )


def participation_limits(
    max_participations: Annotated[
        int | None,
        typer.Option(
            help="Most rounds in which one client takes part. Without it, 1, and a warning: "
            "nothing here enforces it."
        ),
        (*_OF_LIMITS, _solved("max-participations")),
    ] = None,
    min_separation: Annotated[
        int | None,
        typer.Option(
            help="Least distance |i - j| between two of a client's rounds; 1, the default, allows "
            "consecutive ones."
        ),
        (OF_A_PLAN, _solved("min-separation"), _APART),
    ] = None,
    fixed_order: Annotated[
        bool,
        typer.Option(
            "--fixed-order",
            help="Every pass takes --min-separation rounds, in one public order: a client's rounds "
            "are multiples of that apart.",
        ),
        (*_OF_LIMITS, _IN_ANY_ORDER),
    ] = False,
) -> Limits:
    """Return the limits that the options describe."""
    return Limits(max_participations, min_separation, fixed_order)


_SHARED: dict[str, Callable[..., Any]] = {
    "choice": mechanism_choice,
    "limits": participation_limits,
}


def with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of ``_SHARED`` in place of the parameters of these names.

    A given option of another mechanism than the chosen one is refused, whatever its value. The
    command has a parameter ``context``.
    """
    own = inspect.signature(command)
    made_of = {
        name: inspect.signature(_SHARED[name]).parameters
        for name in own.parameters
        if name in _SHARED
    }
    options = [
        option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for declared in own.parameters.values()
        for option in (made_of[declared.name].values() if declared.name in made_of else [declared])
    ]

    @wraps(command)
    def called(**values: Any) -> None:  # noqa: ANN401  whatever the options are
        built = {
            name: _SHARED[name](**{option: values.pop(option) for option in shared})
            for name, shared in made_of.items()
        }
        if "choice" in built and "plan" not in typed(values["context"]):  # which has its own rule
            _refuse_idle(built["choice"], values["context"])
        command(**built, **values)

    # typer reads a command's options from these two
    called.__signature__ = own.replace(parameters=options)  # type: ignore[attr-defined]
    called.__annotations__ = {option.name: option.annotation for option in options}
    return called


def _refuse_idle(choice: MechanismChoice, context: typer.Context) -> None:
    given = typed(context)
    if choice.file is not None and "mechanism" in given:
        raise ConfigError(
            f"mechanism_file={choice.file}: already contains the mechanism; leave out --mechanism."
        )
    if choice.name is _FILE and choice.file is None:
        raise ConfigError("mechanism=file: name the file with --mechanism-file alone.")
    choice.refuse_idle(given)
    choice.refuse_late_restart(context.params.get("rounds"))


def _numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{name}={text}: must be numbers with commas between them.") from None
