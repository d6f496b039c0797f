"""Options of the audits: a frozen dataclass per command, whose fields are the CLI's options.

``takes`` makes a command's options out of the fields, so an option is declared, checked, shown by
--help and made part of a folder's identity in one place. Nothing here imports torch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import StrEnum
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import numpy as np
import typer

from accounting import checks
from accounting.checks import ConfigError
from privpart.cli.idle import OF_FOLDER, OF_SGD, Idle, beside, where, without

_CLIENT = "The client's training"
_ATTACK = "The attack"
_TEXT = "Text"
_DIGITS, _SHOWN = 6, 60  # of the rounds of a view, and of what is quoted in an error
_LATER = frozenset({"before", "plan", "tokens", "words", "pad", "length", "send_buffers"})


_WITHOUT_SEARCH = frozenset({"invert_dense", "bag_of_tokens", "predicted_tokens", "span_test"})
"""Attacks in closed form, whatever the effort."""
_OF_IMAGES = (beside("plan", "is of text"), beside("tokens", "is of text"))
_LOCAL = where("local_steps", 0, "sends a gradient")
_SEARCHES = (
    Idle(
        "batch",
        lambda values: values["batch"] == 1 and (values["plan"], values["tokens"]) != (None, None),
        "one sentence needs no search",
    ),
    Idle(
        "attack",
        lambda values: bool(values["attack"]) and set(values["attack"]) <= _WITHOUT_SEARCH,
        "needs no search",
    ),
)
_CUT = without("plan", "sentences are as long as they are")
_OF_TOKENS = without("tokens", "a plan has its own")
_NO_EPSILON = Idle(
    "noise_multiplier",
    lambda values: not np.any(values["noise_multiplier"]),  # one level, or a list
    "has no epsilon",
)


class Effort(StrEnum):
    """How long each attack may take."""

    QUICK = "quick"
    NORMAL = "normal"
    LONG = "long"


class Mode(StrEnum):
    """Mode of the model while a client trains."""

    TRAIN = "train"
    EVAL = "eval"


class Optimizer(StrEnum):
    """Optimizer of the local steps."""

    SGD = "sgd"
    ADAM = "adam"


BUDGETS: dict[Effort, dict[str, float]] = {
    Effort.QUICK: {"restarts": 1, "max_evaluations": 300, "newton_steps": 0, "steps": 300},
    Effort.NORMAL: {"restarts": 2, "max_evaluations": 500, "newton_steps": 10, "steps": 1000},
    Effort.LONG: {"restarts": 4, "max_evaluations": 3000, "newton_steps": 30, "steps": 6000},
}


EXCHANGES: dict[Effort, int] = {Effort.QUICK: 0, Effort.NORMAL: 4000, Effort.LONG: 40_000}
"""Updates that the attack on text may compute to put tokens into sentences."""


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Options that both audits have: what is attacked, how the client trains, how hard to try.

    Raises:
        ConfigError: a value out of range, or two that contradict each other.
    """

    model: Annotated[
        str | None,
        typer.Option(
            help="lenet, relu-lenet, mlp, resnet8, or your own, which is called without arguments: "
            "MODULE:FUNCTION or ./FILE.py:FUNCTION."
        ),
        beside("plan", "has a model of its own"),
    ] = None
    data: Annotated[
        str | None,
        typer.Option(help="digits, fashion-mnist, or a .safetensors file with x and y."),
        _OF_IMAGES,
    ] = None
    trials: Annotated[
        int,
        typer.Option(help="Updates to attack, each of --batch images or sentences."),
        beside("gradient", "is one update, which already contains its noise"),
    ] = 10
    batch: Annotated[int, typer.Option(help="Images or sentences per update.")] = 1
    weights: Annotated[
        Path | None,
        typer.Option(help="The weights: .safetensors, .npz or .pb; by default untrained."),
    ] = None
    gradient: Annotated[
        Path | None,
        typer.Option(
            help="An update of your own, of the first --batch images: .safetensors, .npz, .pb "
            "(Flower's ArrayRecord), or a folder of peft."
        ),
    ] = None
    before: Annotated[
        Path | None,
        typer.Option(
            help="Weights before the round; --gradient then holds those after it. Same formats."
        ),
        without("gradient", "the weights after the round are missing"),
    ] = None
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder with Fashion-MNIST's four idx files."),
        (*_OF_IMAGES, OF_FOLDER),
    ] = None
    mode: Annotated[
        Mode, typer.Option(help="Mode of the model's layers.", rich_help_panel=_CLIENT), _OF_IMAGES
    ] = Mode.TRAIN
    local_steps: Annotated[
        int, typer.Option(help="Local steps; 0 sends a gradient.", rich_help_panel=_CLIENT)
    ] = 0
    learning_rate: Annotated[
        float,
        typer.Option(help="Learning rate of the local steps.", rich_help_panel=_CLIENT),
        _LOCAL,
    ] = 0.1
    optimizer: Annotated[
        Optimizer,
        typer.Option(help="Optimizer of the local steps.", rich_help_panel=_CLIENT),
        _LOCAL,
    ] = Optimizer.SGD
    momentum: Annotated[
        float,
        typer.Option(help="Momentum of sgd, in [0, 1).", rich_help_panel=_CLIENT),
        (_LOCAL, OF_SGD),
    ] = 0.0
    send_buffers: Annotated[
        bool,
        typer.Option(
            "--send-buffers",
            help="Clients also send running statistics of batch normalisation.",
            rich_help_panel=_CLIENT,
        ),
        (
            *_OF_IMAGES,
            where("mode", "eval", "statistics are not those of the batch"),
            beside("gradient", "has its buffers, or has not"),
        ),
    ] = False
    delta: Annotated[
        float,
        typer.Option(help="Delta of the accountant's epsilon.", rich_help_panel=_CLIENT),
        _NO_EPSILON,
    ] = 1e-5
    hide_labels: Annotated[
        bool,
        typer.Option("--hide-labels", help="Infer the labels.", rich_help_panel=_ATTACK),
    ] = False
    effort: Annotated[
        Effort, typer.Option(help="Budget of each attack.", rich_help_panel=_ATTACK), _SEARCHES
    ] = Effort.NORMAL
    attack: Annotated[
        list[str] | None,
        typer.Option(help="Run only this attack; repeatable.", rich_help_panel=_ATTACK),
    ] = None
    decoys: Annotated[
        int,
        typer.Option(help="Images to hide the truth among.", rich_help_panel=_ATTACK),
        (
            *_OF_IMAGES,
            Idle("batch", lambda values: values["batch"] > 1, "is not ranked among decoys"),
        ),
    ] = 50
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Plan that trains on text: its model, and its clients' sentences.",
            rich_help_panel=_TEXT,
        ),
    ] = None
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="A .safetensors file with tokens (N, T), and perhaps labels (N,) and public (M, "
            "T); with --model or --plan.",
            rich_help_panel=_TEXT,
        ),
    ] = None
    length: Annotated[
        int | None,
        typer.Option(
            help="Cut the sentences of a plan to so many tokens; shorter ones are left out.",
            rich_help_panel=_TEXT,
        ),
        (_CUT, beside("tokens", "are as long as they are")),
    ] = None
    pad: Annotated[
        int | None,
        typer.Option(help="Id of the padding in --tokens.", rich_help_panel=_TEXT),
        _OF_TOKENS,
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of weights, starting points and noise.")] = 0

    def __post_init__(self) -> None:
        self.refuse()

    def refuse(self) -> None:
        """Raise a ConfigError for options with which no audit is possible."""
        self.refuse_missing()
        checks.count("trials", self.trials)
        checks.count("batch", self.batch)
        checks.count("decoys", self.decoys, minimum=0)
        checks.count("seed", self.seed, minimum=0, maximum=checks.MOST_SEED - self.trials)
        checks.probability("delta", self.delta)
        if self.length is not None:
            checks.count("length", self.length, minimum=2)
        if self.pad is not None:
            checks.count("pad", self.pad, minimum=0)
        checks.count("local_steps", self.local_steps, minimum=0)  # LocalSteps checks the others
        if self.before is not None and self.gradient is None:
            raise ConfigError("before: name the weights after the round with gradient.")
        if self.before is not None and self.local_steps == 0:
            raise ConfigError(
                "before: the update is then a change of the weights; say how the client trained, "
                "with local_steps and learning_rate."
            )

    @property
    def of_text(self) -> bool:
        """Whether sentences are attacked, and not images."""
        return self.plan is not None or self.tokens is not None

    def refuse_missing(self) -> None:
        """Raise a ConfigError unless a model and data are named."""
        if self.model is None and self.plan is None:
            raise ConfigError("model is missing: name one (--model), or a plan of text (--plan).")
        if self.data is None and not self.of_text:
            raise ConfigError("data is missing: name images (--data), or text (--plan, --tokens).")

    def identity(self) -> dict[str, Any]:
        """Return every field by name as JSON types: what the results in a folder depend on.

        A folder keeps this text, so a renamed or a new field makes folders of older versions
        refuse to resume.
        """
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        for name in _LATER & values.keys():
            if values[name] in (None, False):
                del values[name]  # as in folders of versions without it
        return {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}

    def typed(self) -> dict[str, Any]:
        """Return ``identity`` without the fields that are not options of this command."""
        options = {option.name for option in fields(self) if option.init}
        return {name: value for name, value in self.identity().items() if name in options}


@dataclass(frozen=True, kw_only=True)
class LeakageOptions(AuditOptions):
    """Options of ``privpart audit leakage``."""

    view: Annotated[
        list[str] | None,
        typer.Option(
            help="'full', a pattern as 'dense1.*', or NAME=PATTERN,PATTERN; repeatable. Of a plan, "
            "by default what it trains."
        ),
    ] = None
    words: Annotated[
        Path | None,
        typer.Option(
            help="Text of each token of --tokens, one a line as in BERT's vocab.txt.",
            rich_help_panel=_TEXT,
        ),
        _OF_TOKENS,
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(help="Rounds by view, as 'full:5,head:20'; the report names the worst."),
    ] = None
    clip: Annotated[
        float | None, typer.Option(help="Joint L2 bound on the update.", rich_help_panel=_CLIENT)
    ] = None
    noise_multiplier: Annotated[
        float,
        typer.Option(help="Noise standard deviation / clip; 0 is none.", rich_help_panel=_CLIENT),
        without("clip", "noise has no scale"),
    ] = 0.0

    def refuse(self) -> None:
        """Raise a ConfigError for options with which no audit is possible."""
        super().refuse()
        views(self.view or ())
        rounds(self.schedule)
        if self.clip is not None:
            checks.positive("clip", self.clip)
        checks.nonnegative("noise_multiplier", self.noise_multiplier)

    def refuse_missing(self) -> None:
        """Raise a ConfigError unless a model, data and, without a plan, a view are named."""
        super().refuse_missing()
        if not self.view and self.plan is None:
            raise ConfigError("view is missing: name at least one, such as --view full.")


@dataclass(frozen=True, kw_only=True)
class DefencesOptions(AuditOptions):
    """Options of ``privpart audit defences``: it sweeps over updates of its own, without decoys."""

    clip: Annotated[list[float], typer.Option(help="Joint L2 bound on the update; repeatable.")]
    noise_multiplier: Annotated[
        list[float], typer.Option(help="Noise standard deviation / clip; repeatable.")
    ] = field(default_factory=lambda: [0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0])
    view: Annotated[
        str | None,
        typer.Option(
            help="'full' (the default), a pattern as 'dense1.*', or NAME=PATTERN,PATTERN. Of a "
            "plan, by default what it trains."
        ),
    ] = None
    trials: Annotated[
        int, typer.Option(help="Updates to attack, each of --batch images or sentences.")
    ] = 5
    gradient: None = field(default=None, init=False)
    before: None = field(default=None, init=False)
    decoys: int = field(default=0, init=False)

    def identity(self) -> dict[str, Any]:
        """Return every field by name; of images the default view is "full", as it always was."""
        whole = {} if self.of_text or self.view is not None else {"view": "full"}
        return super().identity() | whole

    def refuse(self) -> None:
        """Raise a ConfigError for options with which no sweep is possible."""
        super().refuse()
        views([] if self.view is None else [self.view])
        for clip in self.clip:
            checks.positive("clip", clip)
        for z in self.noise_multiplier:
            checks.nonnegative("noise_multiplier", z)


def views(typed: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return name -> patterns.

    >>> views(["full", "dense1.*", "head=dense2.*,norm.*"])
    {'full': ['*'], 'dense1.*': ['dense1.*'], 'head': ['dense2.*', 'norm.*']}
    """
    found: dict[str, Sequence[str]] = {}
    for text in typed:
        name, equals, patterns = text.partition("=")
        if not name:
            raise ConfigError(f"view={text!r}: has no name; pass NAME=PATTERN, or a pattern.")
        if name in found:
            raise ConfigError(f"view={text!r}: {name!r} is named twice.")
        found[name] = patterns.split(",") if equals else ["*"] if text == "full" else [text]
    return found


def rounds(typed: str | None) -> list[str]:
    """Return the view of each round.

    >>> rounds("full:2,head:1")
    ['full', 'full', 'head']
    """
    sent: list[str] = []
    for part in () if typed is None else typed.split(","):
        view, colon, count = part.rpartition(":")
        if not colon or not count.isdecimal() or len(count) > _DIGITS or int(count) < 1:
            raise ConfigError(
                f"schedule={part[:_SHOWN]!r}: must be VIEW:ROUNDS, as full:5, with at most "
                f"{10**_DIGITS - 1} rounds."
            )
        sent += [view] * int(count)
    return sent


_Options = TypeVar("_Options", bound=AuditOptions)
_Own = ParamSpec("_Own")


def takes(
    kind: type[_Options],
) -> Callable[[Callable[Concatenate[_Options, _Own], None]], Callable[..., None]]:
    """Return a decorator that gives a command the fields of ``kind`` as its CLI options.

    The command receives them as one ``kind``, its first argument; its other parameters stay
    options of the command itself.
    """

    def decorate(
        command: Callable[Concatenate[_Options, _Own], None],
    ) -> Callable[..., None]:
        own = list(signature(command).parameters.values())[1:]
        made = list(_parameters(kind))

        def run(**typed: Any) -> None:  # noqa: ANN401 - typer passes each option by its type
            options = kind(**{option.name: typed.pop(option.name) for option in made})
            command(options, **typed)  # type: ignore[call-arg]

        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        required_first = sorted([*made, *own], key=lambda p: p.default is not Parameter.empty)
        run.__signature__ = Signature(required_first)  # type: ignore[attr-defined]
        return run

    return decorate


def _parameters(kind: type[AuditOptions]) -> Iterator[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for option in fields(kind):
        if option.init:
            yield Parameter(
                option.name,
                Parameter.KEYWORD_ONLY,
                annotation=hints[option.name],
                default=_default(option),
            )


def _default(option: Field[Any]) -> Any:  # noqa: ANN401 - whatever the option holds
    if option.default_factory is not MISSING:
        return option.default_factory()
    return Parameter.empty if option.default is MISSING else option.default
