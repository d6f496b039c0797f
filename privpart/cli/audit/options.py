"""Options of the leakage audits: a frozen dataclass per command, in which each is spelled once.

A field with a ``typer.Option`` is an option of the command line; the others, which are rarely
needed, are keys of the TOML file that ``--settings`` names. An option or key that has no effect
beside another is refused. Nothing here imports torch.
"""

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import typer
from typer.models import OptionInfo

from accounting import checks
from accounting.checks import ConfigError
from privpart.cli.idle import OF_FOLDER, OF_SGD, Idle, beside, where, without
from privpart.cli.options import Format, FormatOption, HtmlOption

Effort = Literal["quick", "normal", "long"]
FailOn = Literal["recovered", "partial", "ambiguous"]
"""Verdicts that can fail a job, the most severe first."""

_ATTACK = "The attack"
# Digits of the rounds of a view, and characters that an error quotes: both are typed.
_DIGITS, _SHOWN = 6, 60
_OF_THE_OUTPUT = frozenset({"settings", "out", "html", "form", "fail_on"})
"""Fields on which no result depends."""
_WITHOUT_SEARCH = frozenset({"invert_dense", "bag_of_tokens", "predicted_tokens", "span_test"})
"""Attacks in closed form, whatever the effort."""
_OF_IMAGES = (beside("plan", "is of text"), beside("tokens", "is of text"))
_OF_TOKENS = without("tokens", "a plan has its own")
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


# A dataclass takes no list as a default.
_NOISES: Any = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0)


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """What is attacked, how the client trains, and how hard to try.

    The keys of ``--settings``:

    Attributes:
        data_dir: folder with Fashion-MNIST's four idx files.
        mode: of the model's layers while the client trains.
        local_steps: of the client; 0 sends a gradient.
        learning_rate: of the local steps.
        optimizer: of the local steps.
        momentum: of SGD, in [0, 1).
        send_buffers: whether clients also send running statistics of batch normalisation.
        delta: of the accountant's epsilon.
        length: cut the sentences of a plan to this many tokens; shorter ones are left out.
        pad: id of the padding in ``tokens``.
        seed: of weights, starting points and noise.

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
    plan: Annotated[
        Path | None,
        typer.Option(help="Plan that trains on text: its model, and its clients' sentences."),
    ] = None
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="A .safetensors file with tokens (N, T), and perhaps labels (N,) and public (M, "
            "T); with --model or --plan."
        ),
    ] = None
    trials: Annotated[
        int,
        typer.Option(help="Updates to attack, each of --batch images or sentences."),
        beside("gradient", "is one update, which already contains its noise"),
    ] = 10
    batch: Annotated[int, typer.Option(help="Images or sentences per update.")] = 1
    weights: Annotated[
        Path | None,
        typer.Option(help="The weights: .safetensors or .npz; by default untrained."),
    ] = None
    hide_labels: Annotated[
        bool, typer.Option("--hide-labels", help="Infer the labels.", rich_help_panel=_ATTACK)
    ] = False
    effort: Annotated[
        Effort, typer.Option(help="Budget of each attack.", rich_help_panel=_ATTACK), _SEARCHES
    ] = "normal"
    attack: Annotated[
        list[str] | None,
        typer.Option(help="Run only this attack; repeatable.", rich_help_panel=_ATTACK),
    ] = None
    settings: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with what is rarely typed: local_steps, seed and others, as in "
            "docs/audits.md."
        ),
    ] = None
    out: Annotated[Path, typer.Option(help="Folder for the report, pictures and trials/.")]
    form: FormatOption = Format.TABLE

    data_dir: Annotated[Path | None, (*_OF_IMAGES, OF_FOLDER)] = None
    mode: Annotated[Literal["train", "eval"], _OF_IMAGES] = "train"
    local_steps: int = 0
    learning_rate: Annotated[float, _LOCAL] = 0.1
    optimizer: Annotated[Literal["sgd", "adam"], _LOCAL] = "sgd"
    momentum: Annotated[float, (_LOCAL, OF_SGD)] = 0.0
    send_buffers: Annotated[
        bool,
        (
            *_OF_IMAGES,
            where("mode", "eval", "statistics are not those of the batch"),
            beside("gradient", "has its buffers, or has not"),
        ),
    ] = False
    delta: Annotated[
        float,
        Idle(
            "noise_multiplier",
            # One level of leakage, or the list of a sweep.
            lambda values: not np.any(values["noise_multiplier"]),
            "has no epsilon",
        ),
    ] = 1e-5
    length: Annotated[
        int | None,
        (
            without("plan", "sentences are as long as they are"),
            beside("tokens", "are as long as they are"),
        ),
    ] = None
    pad: Annotated[int | None, _OF_TOKENS] = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.refuse()

    def refuse(self) -> None:
        """Raise a ConfigError for options with which no audit is possible."""
        if self.model is None and self.plan is None:
            raise ConfigError("model is missing: name one (--model), or a plan of text (--plan).")
        if self.data is None and not self.of_text:
            raise ConfigError("data is missing: name images (--data), or text (--plan, --tokens).")
        checks.count("trials", self.trials)
        checks.count("batch", self.batch)
        checks.count("seed", self.seed, minimum=0, maximum=checks.MOST_SEED - self.trials)
        checks.probability("delta", self.delta)
        if self.length is not None:
            checks.count("length", self.length, minimum=2)
        if self.pad is not None:
            checks.count("pad", self.pad, minimum=0)
        # LocalSteps checks the others.
        checks.count("local_steps", self.local_steps, minimum=0)

    @property
    def of_text(self) -> bool:
        """Whether sentences are attacked, and not images."""
        return self.plan is not None or self.tokens is not None

    @property
    def views(self) -> dict[str, Sequence[str]]:
        """The views that were named, each with its patterns."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """Return each field on which the results in a folder depend, as JSON types."""
        values = {option.name: getattr(self, option.name) for option in fields(self) if option.init}
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in values.items()
            if name not in _OF_THE_OUTPUT
        }


@dataclass(frozen=True, kw_only=True)
class LeakageOptions(AuditOptions):
    """Options of ``privpart audit leakage``; two more keys of ``--settings``.

    Attributes:
        before: weights before the round; ``gradient`` then holds those after it. Same formats.
        words: file with the text of each token of ``tokens``, one a line as in BERT's vocab.txt.
    """

    view: Annotated[
        list[str] | None,
        typer.Option(
            help="'full', a pattern as 'dense1.*', or NAME=PATTERN,PATTERN; repeatable. Of a plan, "
            "by default what it trains."
        ),
    ] = None
    gradient: Annotated[
        Path | None,
        typer.Option(
            help="An update of your own, of the first --batch images: .safetensors, .npz, or a "
            "folder of peft."
        ),
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(help="Rounds by view, as 'full:5,head:20'; the report names the worst."),
    ] = None
    clip: Annotated[float | None, typer.Option(help="Joint L2 bound on the update.")] = None
    noise_multiplier: Annotated[
        float,
        typer.Option(help="Noise standard deviation / clip; 0 is none."),
        without("clip", "noise has no scale"),
    ] = 0.0
    fail_on: Annotated[
        FailOn | None, typer.Option(help="Exit with 4 at this verdict or a more severe one.")
    ] = None
    html: HtmlOption = None

    before: Annotated[
        Path | None, without("gradient", "the weights after the round are missing")
    ] = None
    words: Annotated[Path | None, _OF_TOKENS] = None

    def refuse(self) -> None:
        """Raise a ConfigError for options with which no audit is possible."""
        super().refuse()
        if not self.view and self.plan is None:
            raise ConfigError("view is missing: name at least one, such as --view full.")
        _ = self.views, self.rounds
        if self.clip is not None:
            checks.positive("clip", self.clip)
        checks.nonnegative("noise_multiplier", self.noise_multiplier)
        if self.before is not None and self.gradient is None:
            raise ConfigError("before: name the weights after the round with gradient.")
        if self.before is not None and self.local_steps == 0:
            raise ConfigError(
                "before: the update is then a change of the weights; say how the client trained, "
                "with local_steps and learning_rate."
            )

    @property
    def views(self) -> dict[str, Sequence[str]]:
        """The views that were named, each with its patterns; {} is what a plan trains."""
        return views(self.view or ())

    @property
    def rounds(self) -> list[str]:
        """The view of each round of ``schedule``."""
        return rounds(self.schedule)


@dataclass(frozen=True, kw_only=True)
class DefencesOptions(AuditOptions):
    """Options of ``privpart audit defences``: it sweeps over updates of its own.

    ``batch``, ``weights`` and ``hide_labels`` are keys of ``--settings``.
    """

    clip: Annotated[list[float], typer.Option(help="Joint L2 bound on the update; repeatable.")]
    noise_multiplier: Annotated[
        list[float], typer.Option(help="Noise standard deviation / clip; repeatable.")
    ] = _NOISES
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
    batch: int = 1
    weights: Path | None = None
    hide_labels: bool = False
    gradient: None = field(default=None, init=False)
    before: None = field(default=None, init=False)
    words: None = field(default=None, init=False)

    @property
    def views(self) -> dict[str, Sequence[str]]:
        """The view; {} is what a plan trains."""
        if self.view is not None:
            return views([self.view])
        return {} if self.plan is not None else {"full": ["*"]}

    def identity(self) -> dict[str, Any]:
        """Return each field on which the results in a folder depend, with the view as it is."""
        return super().identity() | {"view": self.view or next(iter(self.views), None)}

    def refuse(self) -> None:
        """Raise a ConfigError for options with which no sweep is possible."""
        super().refuse()
        _ = self.views
        for clip in self.clip:
            checks.positive("clip", clip)
        for z in self.noise_multiplier:
            checks.nonnegative("noise_multiplier", z)


AnyOptions = LeakageOptions | DefencesOptions


def views(typed: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return name -> patterns.

    >>> views(["full", "dense1.*", "head=dense2.*,norm.*"])
    {'full': ['*'], 'dense1.*': ['dense1.*'], 'head': ['dense2.*', 'norm.*']}
    """
    patterns_of: dict[str, Sequence[str]] = {}
    for text in typed:
        name, equals, patterns = text.partition("=")
        if not name:
            raise ConfigError(f"view={text!r}: has no name; pass NAME=PATTERN, or a pattern.")
        if name in patterns_of:
            raise ConfigError(f"view={text!r}: {name!r} is named twice.")
        patterns_of[name] = patterns.split(",") if equals else ["*"] if text == "full" else [text]
    return patterns_of


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


def takes(kind: type[_Options]) -> Callable[[Callable[[_Options], None]], Callable[..., None]]:
    """Return a decorator that gives a command the fields of ``kind`` as its options."""
    fields_of = list(signature(kind).parameters.values())
    typed = [p for p in fields_of if any(isinstance(a, OptionInfo) for a in _about(p))]
    keys = [p for p in fields_of if p not in typed]

    def decorate(command: Callable[[_Options], None]) -> Callable[..., None]:
        def run(**values: Any) -> None:  # noqa: ANN401 - typer passes each option by its type
            path = values["settings"]
            settings = {} if path is None else _read(path, keys)
            options = kind(**values, **settings)
            _refuse_idle(options, [key for key in keys if key.name in settings])
            command(options)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        # Python asks for parameters without a default first.
        required_first = sorted(typed, key=lambda p: p.default is not Parameter.empty)
        run.__signature__ = Signature(required_first)  # type: ignore[attr-defined]
        return run

    return decorate


def _about(parameter: Parameter) -> tuple[Any, ...]:
    """Return what the annotation of a field says besides its type."""
    return getattr(parameter.annotation, "__metadata__", ())


def _read(path: Path, keys: Sequence[Parameter]) -> dict[str, Any]:
    """Return the settings in a TOML file.

    Raises:
        ConfigError: it cannot be read, or has a key that is unknown or of another type.
    """
    from pydantic import ConfigDict, ValidationError, create_model
    from pydantic_core import to_json

    allowed: Any = {key.name: (key.annotation, None) for key in keys}
    # Made here, because the keys are the fields that the command line does not have.
    model = create_model("Settings", __config__=ConfigDict(extra="forbid"), **allowed)
    try:
        values = tomllib.loads(path.read_text("utf-8"))
        # Strict JSON, unlike strict Python values, takes a string for a path.
        settings = model.model_validate_json(to_json(values), strict=True)
    except ValidationError as error:
        faults = "; ".join(f"{fault['loc'][0]}: {fault['msg']}" for fault in error.errors())
        names = ", ".join(allowed)
        raise ConfigError(f"settings={path}: {faults}. Keys are {names}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"settings={path}: cannot be read: {error}.") from None
    return {name: getattr(settings, name) for name in settings.model_fields_set}


def _refuse_idle(options: AuditOptions, keys: Sequence[Parameter]) -> None:
    """Raise a ConfigError for a setting without effect; of typed options ``Command`` does."""
    for key in keys:
        for about in _about(key):
            for rule in about if isinstance(about, tuple) else (about,):
                if rule.where(vars(options)):
                    state = f"{rule.owner} = {getattr(options, rule.owner)}"
                    raise ConfigError(f"settings: {state}: {rule.why}; leave out {key.name}.")
