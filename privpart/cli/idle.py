"""Idle options: what was typed and can have no effect beside something else is refused.

``TABLE`` lists every option of every command, either as free, which matters whatever else is typed,
or with what makes it idle. ``Command`` refuses an idle option before the command runs, also when it
equals its default: whoever typed it meant something. A test compares the table with the parser and
tries every line of it. The options of mechanisms have one more rule, which plan files share
(``MechanismChoice.refuse_idle``): the chosen mechanism must take them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand

from accounting import ConfigError

Values = Mapping[str, Any]
"""Every parameter of a command by name, typed or not."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Options that have no effect in a situation.

    Args:
        options: their names, with spaces between them.
        owner: the option that decides, which the sentence names with its value.
        where: whether these values are the situation.
        why: what the owner does; the sentence ends with "leave out" and the options.
    """

    options: str
    owner: str
    where: Callable[[Values], bool]
    why: str


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one command: those that always matter, and the rules for the others."""

    free: str
    idle: tuple[Idle, ...] = ()


def _given(owner: str) -> Callable[[Values], bool]:
    return lambda values: bool(values[owner])


def _missing(owner: str) -> Callable[[Values], bool]:
    return lambda values: not values[owner]


def _is(owner: str, value: object) -> Callable[[Values], bool]:
    return lambda values: bool(values[owner] == value)


_MECHANISM = (
    "mechanism mechanism_file restart_every estimator completed release bands coefficients "
    "normalize_columns fit objective buffers decay scale"
)
_LIMITS = "max_participations min_separation fixed_order"
_SAMPLING = "sampling expected_batch bins draws draw_seed"


def _beside_plan(options: str) -> Idle:
    return Idle(options, "plan", _given("plan"), "already contains these values")


def _prose(options: str) -> Idle:
    return Idle(options, "statement", _given("statement"), "prints prose")


def _solved(name: str) -> Idle:
    return Idle(name, "solve", _is("solve", name.replace("_", "-")), "finds this")


def _sampled(draws: str) -> tuple[Idle, ...]:
    """Return what each sampler makes idle; ``draws`` are the options of Monte Carlo."""
    return (
        Idle(
            "min_separation",
            "sampling",
            lambda values: values["sampling"] in ("poisson", "balls-in-bins"),
            "decides itself how far a member's rounds are apart",
        ),
        Idle(
            f"bins {draws}",
            "sampling",
            _is("sampling", "poisson"),
            "has no bins, and needs no draws",
        ),
        Idle(
            "expected_batch method",
            "sampling",
            _is("sampling", "balls-in-bins"),
            "needs the bins alone",
        ),
        Idle(
            "bins method",
            "sampling",
            _is("sampling", "b-min-sep"),
            "has no bins, and is estimated by draws",
        ),
    )


_DATA_DIR = Idle(
    "data_dir",
    "data",
    lambda values: values["data"] != "fashion-mnist",
    "is not read from a folder",
)
_MOMENTUM = Idle("momentum", "optimizer", _is("optimizer", "adam"), "has a momentum of its own")
_WITHOUT_SEARCH = frozenset({"invert_dense", "bag_of_tokens", "predicted_tokens", "span_test"})
"""Attacks in closed form, whatever the effort."""
_OF_IMAGES = "data data_dir mode send_buffers"
_AUDIT_FREE = "batch weights local_steps hide_labels attack seed view out form clip"


def _one_sentence(values: Mapping[str, Any]) -> bool:
    return values["batch"] == 1 and (values["plan"], values["tokens"]) != (None, None)


def _text(of_images: str) -> tuple[Idle, ...]:
    return (
        Idle("model", "plan", _given("plan"), "has a model of its own"),
        Idle(of_images, "plan", _given("plan"), "is of text"),
        Idle(of_images, "tokens", _given("tokens"), "is of text"),
        Idle("effort", "batch", _one_sentence, "one sentence needs no search"),
        Idle("length", "plan", _missing("plan"), "sentences are as long as they are"),
        Idle("length", "tokens", _given("tokens"), "are as long as they are"),
        Idle("pad", "tokens", _missing("tokens"), "a plan has its own"),
    )


_AUDIT = (
    _DATA_DIR,
    Idle(
        "learning_rate optimizer momentum", "local_steps", _is("local_steps", 0), "sends a gradient"
    ),
    _MOMENTUM,
    Idle("send_buffers", "mode", _is("mode", "eval"), "statistics are not those of the batch"),
    Idle(
        "effort",
        "attack",
        lambda values: bool(values["attack"]) and set(values["attack"]) <= _WITHOUT_SEARCH,
        "needs no search",
    ),
)


def _hidden(row: Callable[[Values], str]) -> Callable[[Values], bool]:
    """Return whether --only leaves out the row of that name."""
    return lambda values: values["only"] is not None and values["only"] not in row(values)


def _own_row(values: Values) -> str:
    return f"{'file' if values['mechanism_file'] else values['mechanism']}, as given"


TABLE: Mapping[str, Options] = {
    "epsilon": Options(
        free="delta population allow_large_delta max_epsilon plan",
        idle=(
            _beside_plan(f"rounds noise_multiplier {_MECHANISM} {_LIMITS} {_SAMPLING}"),
            _prose("form"),
            Idle("plot_against", "plot", _missing("plot"), "nothing is drawn"),
            Idle(
                "expected_batch bins draws draw_seed",
                "sampling",
                _missing("sampling"),
                "nobody is sampled",
            ),
            Idle(
                "log max_participations fixed_order cross_check plot statement html",
                "sampling",
                _given("sampling"),
                "decides who takes part, and has a report of its own",
            ),
            *_sampled("draws draw_seed"),
            Idle(
                "draw_seed",
                "draws",
                lambda values: values["sampling"] == "balls-in-bins" and values["draws"] is None,
                "nothing is drawn",
            ),
        ),
    ),
    "calibrate": Options(
        free=f"target_epsilon rounds delta population allow_large_delta solve {_MECHANISM} form",
        idle=(
            _solved("noise_multiplier"),
            _solved("max_participations"),
            _solved("min_separation"),
            Idle(
                "fixed_order",
                "solve",
                lambda values: values["solve"] != "noise-multiplier",
                "is for clients in any order",
            ),
            Idle(
                "sampling expected_batch bins draws",
                "solve",
                lambda values: values["solve"] != "noise-multiplier",
                "is for a run that hides nobody",
            ),
            Idle(
                "expected_batch bins draws",
                "sampling",
                _missing("sampling"),
                "nobody is sampled",
            ),
            Idle(
                "max_participations fixed_order",
                "sampling",
                _given("sampling"),
                "decides who takes part",
            ),
            *_sampled("draws"),
        ),
    ),
    "mechanisms": Options(
        free="delta population allow_large_delta plan target_epsilon only plot html form",
        idle=(
            _beside_plan(f"rounds {_MECHANISM} {_LIMITS}"),
            Idle(_MECHANISM, "only", _hidden(_own_row), "leaves out the row of this mechanism"),
            Idle(
                "optimal",
                "only",
                _hidden(lambda _: "dense, optimal"),
                "leaves out 'dense, optimal'",
            ),
        ),
    ),
    "init": Options(free="folder"),
    "flower init": Options(free="folder"),
    "doctor": Options(
        free="plan form",
        idle=(Idle("all_clients", "plan", _missing("plan"), "there are no clients to read"),),
    ),
    "train": Options(
        free="out plan resume evaluate_every workers batching precision device tensorboard health "
        "explain form",
        idle=(
            Idle("fork_of seed", "resume", _given("resume"), "the run has its start and its noise"),
            Idle("seed", "fork_of", _given("fork_of"), "a fork of a private run has a secret key"),
            Idle("adopt", "resume", _missing("resume"), "there is no run to adopt"),
            Idle("worker_timeout", "workers", _is("workers", 1), "one process has no workers"),
        ),
    ),
    "close": Options(free="run yes adopt"),
    "export": Options(
        free="run out part",
        idle=(Idle("plan", "part", _is("part", "trained"), "needs no plan"),),
    ),
    "budget": Options(
        free="population form",
        idle=(
            Idle(
                "limit_epsilon raise_limit remove_limit",
                "population",
                _missing("population"),
                "a limit is of one population",
            ),
            Idle(
                "limit_epsilon raise_limit delta",
                "remove_limit",
                _given("remove_limit"),
                "sets no limit",
            ),
            Idle("raise_limit", "limit_epsilon", _missing("limit_epsilon"), "nothing is raised"),
        ),
    ),
    "report": Options(
        free="run about_template",
        idle=(
            _prose("form"),
            Idle("about schema", "registry", _missing("registry"), "no entry is written"),
            Idle(
                "delta allow_large_delta vouch public_key max_epsilon statement html registry form",
                "about_template",
                _given("about_template"),
                "prints a file to be filled in, and no report",
            ),
            Idle("allow_large_delta", "delta", _missing("delta"), "the run has its own delta"),
        ),
    ),
    "verify": Options(free="run model public_key form"),
    "schedule": Options(free="plan every form"),
    "inspect": Options(free="run out rounds channels against form"),
    "costs": Options(
        free="model plan train ladder down up plot form",
        idle=(
            _beside_plan("examples epochs batch_size optimizer momentum measure"),
            _MOMENTUM,
        ),
    ),
    "verify-gradients": Options(free="target tolerance form"),
    "frontier": Options(free="file out jobs device tune_only audit form"),
    "demo": Options(free="out data seed seeds jobs", idle=(_DATA_DIR,)),
    "sweep run": Options(
        free="file out jobs html form",
        idle=(
            Idle("cell_timeout", "jobs", _is("jobs", 1), "one process trains every cell itself"),
        ),
    ),
    "sweep show": Options(free="folder html form"),
    "audit leakage": Options(
        free=f"{_AUDIT_FREE} gradient schedule fail_on plan tokens html",
        idle=(
            *_text(f"{_OF_IMAGES} decoys"),
            Idle("words", "tokens", _missing("tokens"), "a plan has its own"),
            *_AUDIT,
            Idle(
                "before",
                "gradient",
                _missing("gradient"),
                "the weights after the round are missing",
            ),
            Idle(
                "trials",
                "gradient",
                _given("gradient"),
                "is one update, which already contains its noise",
            ),
            Idle("send_buffers", "gradient", _given("gradient"), "has its buffers, or has not"),
            Idle("noise_multiplier", "clip", _missing("clip"), "noise has no scale"),
            Idle("delta", "noise_multiplier", _missing("noise_multiplier"), "has no epsilon"),
            Idle(
                "decoys", "batch", lambda values: values["batch"] > 1, "is not ranked among decoys"
            ),
        ),
    ),
    "audit defences": Options(
        free=f"{_AUDIT_FREE} trials noise_multiplier plan tokens",
        idle=(
            *_text(_OF_IMAGES),
            *_AUDIT,
            Idle(
                "delta",
                "noise_multiplier",
                lambda values: not any(values["noise_multiplier"]),
                "has no epsilon",
            ),
        ),
    ),
    "audit epsilon": Options(
        free="run out confidence fail_on html form",
        idle=(
            Idle(
                "plan simulate replay count runs observer seed",
                "run",
                _given("run"),
                "has a plan, canaries and noise of its own",
            ),
            Idle(
                "count runs observer", "simulate", _missing("simulate"), "no canaries are simulated"
            ),
        ),
    ),
}
"""Every option of every command, by the words that name the command."""


def typed(context: typer.Context) -> frozenset[str]:
    """Return the parameters that were given by whoever typed the command, whatever their values.

    An option that equals its default was still typed, and what was typed is never ignored.
    """
    return frozenset(
        name
        for name in context.params
        if getattr(context.get_parameter_source(name), "name", "") in ("COMMANDLINE", "ENVIRONMENT")
    )


class Command(TyperCommand):
    """A command that refuses idle options before it runs."""

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401  click's, vendored
        """Run the command, unless ``refuse_idle`` raises."""
        refuse_idle(ctx)
        return super().invoke(ctx)


def refuse_idle(context: Any) -> None:  # noqa: ANN401  click's, vendored
    """Raise ``ConfigError`` if an option was typed that has no effect beside another."""
    options = TABLE.get(_words(context))
    given = typed(context)
    for rule in options.idle if options is not None else ():
        idle = [name for name in rule.options.split() if name in given]
        if idle and rule.where(context.params):
            written = {option.name: option.opts[-1] for option in context.command.params}
            owner, value = written[rule.owner], context.params[rule.owner]
            listed = ", ".join(written[name] for name in idle)
            if value is None:
                said = f"without {owner}: {rule.why}; add {owner}, or leave out {listed}."
            else:
                said = f"{_shown(owner, value)}: {rule.why}; leave out {listed}."
            raise ConfigError(said)


def _words(context: Any) -> str:  # noqa: ANN401  click's, vendored
    """Return the words that name a command: "audit leakage"."""
    words = []
    while context.parent is not None:
        words.append(str(context.info_name))
        context = context.parent
    return " ".join(reversed(words))


def _shown(option: str, value: object) -> str:
    if value is True:
        return option
    values = value if isinstance(value, list | tuple) else [value]
    return " ".join(f"{option} {own}" for own in values)
