"""Options of ``privpart audit leakage``: a frozen dataclass, in which each is spelled once.

What is rarely needed are keys of the TOML file that ``--settings`` names. An option or key that
has no effect beside another is refused. Nothing here imports torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from accounting import checks
from accounting.checks import ConfigError
from privpart.cli.idle import OF_IMAGES, Idle, beside, without
from privpart.cli.options import FormatOption, HtmlOption

# Imported where used: pydantic is slow to import, and every command imports its options.
if TYPE_CHECKING:
    from privpart.cli.audit.settings import Keys

Effort = Literal["quick", "normal", "long"]
FailOn = Literal["recovered", "partial", "ambiguous", "attack failed"]
"""Verdicts that can fail a job, the most severe first."""

_ATTACK = "The attack"
_SHOWN = 60
"""Characters of what was typed that an error quotes."""
_OF_THE_OUTPUT = {"keys", "settings", "out", "html", "form", "fail_on"}
"""Fields on which no result depends; the keys are listed beside the others."""
_WITHOUT_SEARCH = frozenset({"invert_dense", "bag_of_tokens", "predicted_tokens", "span_test"})
"""Attacks in closed form, whatever the effort."""
_SEARCHES = (
    Idle(
        "batch",
        lambda values: (
            values["batch"] == 1
            and not values["transform"]
            and (values["plan"], values["tokens"]) != (None, None)
        ),
        "one sentence needs no search",
    ),
    Idle(
        "attack",
        lambda values: bool(values["attack"]) and set(values["attack"]) <= _WITHOUT_SEARCH,
        "needs no search",
    ),
)


@dataclass(frozen=True, kw_only=True)
class LeakageOptions:
    """What is attacked, how the client trains, and how hard to try.

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
        typer.Option(
            help="digits, fashion-mnist, or a .safetensors, .npz or .pt file with x and y."
        ),
        OF_IMAGES,
    ] = None
    plan: Annotated[
        Path | None,
        typer.Option(help="Plan that trains on text: its model, and its clients' sentences."),
    ] = None
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="A .safetensors, .npz or .pt file with tokens (N, T), and perhaps labels (N,) and "
            "public (M, T); with --model or --plan."
        ),
    ] = None
    view: Annotated[
        list[str] | None,
        typer.Option(
            help="'full', a pattern as 'dense1.*', or NAME=PATTERN,PATTERN; repeatable. Of a plan, "
            "by default what it trains."
        ),
    ] = None
    trials: Annotated[
        int,
        typer.Option(help="Updates to attack, each of --batch images or sentences."),
        beside("gradient", "is one update, which already contains its noise"),
    ] = 10
    batch: Annotated[int, typer.Option(help="Images or sentences per client.")] = 1
    weights: Annotated[
        Path | None,
        typer.Option(help="The weights: .safetensors, .npz or .pt; by default untrained."),
    ] = None
    gradient: Annotated[
        Path | None,
        typer.Option(
            help="An update of your own, of the first --batch images: .safetensors, .npz, .pt, or "
            "a folder of peft."
        ),
    ] = None
    transform: Annotated[
        list[str] | None,
        typer.Option(
            help="What clients do to an update before the clip, in this order: top-k:0.1, "
            "prune:0.9, signs, bits:4, clip-per-tensor:0.05, or sum:20 (the server sees sums of 20 "
            "clients); repeatable."
        ),
    ] = None
    clip: Annotated[
        str | None,
        typer.Option(
            help="Joint L2 bound on the update; several, as '0.1,1', repeat the audit of one view."
        ),
    ] = None
    noise_multiplier: Annotated[
        str,
        typer.Option(help="Noise standard deviation / clip, or several; 0 is none."),
        without("clip", "noise has no scale"),
    ] = "0"
    effort: Annotated[
        Effort, typer.Option(help="Budget of each attack.", rich_help_panel=_ATTACK), _SEARCHES
    ] = "normal"
    attack: Annotated[
        list[str] | None,
        typer.Option(help="Run only this attack; repeatable.", rich_help_panel=_ATTACK),
    ] = None
    fail_on: Annotated[
        str | None,
        typer.Option(
            help="Exit with 4 at this verdict or a more severe one: recovered, partial, ambiguous, "
            "'attack failed'. Or report.json of an earlier audit: exit with 4 if a view is worse "
            "than there, or is in one of the two only."
        ),
    ] = None
    out: Annotated[Path, typer.Option(help="Folder for the report, pictures and trials/.")]
    html: HtmlOption = None
    form: FormatOption = "table"
    settings: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with what is rarely typed: local_steps, seed and others, as in "
            "docs/how-to/audit-leakage.md."
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.model is None and self.plan is None:
            raise ConfigError("model is missing: name one (--model), or a plan of text (--plan).")
        if self.data is None and not self.of_text:
            raise ConfigError("data is missing: name images (--data), or text (--plan, --tokens).")
        if not self.view and self.plan is None:
            raise ConfigError("view is missing: name at least one, such as --view full.")
        checks.count("trials", self.trials)
        checks.count("batch", self.batch)
        checks.count("seed", self.keys.seed, maximum=checks.MOST_SEED - self.trials, minimum=0)
        for clip in self.clips:
            if clip is not None:
                checks.positive("clip", clip)
        for z in self.noises:
            checks.nonnegative("noise_multiplier", z)
        _ = self.views
        # A given update was clipped and noised once, by whoever sent it.
        if self.levels > 1 and self.gradient:
            raise ConfigError(
                "clip, noise_multiplier: give one value each beside --gradient, the one with which "
                "that update was sent."
            )
        self.keys.refuse_idle(vars(self) | {"noises": self.noises})

    @cached_property
    def keys(self) -> "Keys":
        """What the file of settings holds."""
        from privpart.cli.audit.settings import Keys

        return Keys() if self.settings is None else Keys.read(self.settings)

    @property
    def of_text(self) -> bool:
        """Whether sentences are attacked, and not images."""
        return self.plan is not None or self.tokens is not None

    @property
    def clips(self) -> list[float | None]:
        """The clips, each once; None leaves the update as it is."""
        return [None] if self.clip is None else [*listed("clip", self.clip)]

    @property
    def noises(self) -> list[float]:
        """The noise multipliers, each once."""
        return listed("noise_multiplier", self.noise_multiplier)

    @property
    def levels(self) -> int:
        """How often the audit is repeated."""
        return len(self.clips) * len(self.noises)

    @property
    def views(self) -> dict[str, Sequence[str]]:
        """The patterns of each view that was named; {} is what a plan trains."""
        patterns_of: dict[str, Sequence[str]] = {}
        for text in self.view or ():
            name, equals, patterns = text.partition("=")
            if not name or name in patterns_of:
                raise ConfigError(
                    f"view={text!r}: must have a name, and each another; pass NAME=PATTERN, or a "
                    "pattern."
                )
            alone = ["*"] if text == "full" else [text]
            patterns_of[name] = patterns.split(",") if equals else alone
        return patterns_of

    def identity(self) -> dict[str, Any]:
        """Return each field on which the results in a folder depend, as JSON types."""
        typed = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(self).items()
            if name not in _OF_THE_OUTPUT
        }
        return typed | self.keys.model_dump(mode="json")


def listed(name: str, typed: str) -> list[float]:
    """Return the values of an option, each once.

    >>> listed("clip", "0.1,1,1")
    [0.1, 1.0]
    """
    try:
        return list(dict.fromkeys(map(float, typed.split(","))))
    except ValueError:
        raise ConfigError(
            f"{name}={typed[:_SHOWN]!r}: must be a number, or several as 0.1,1."
        ) from None


def takes_options(command: Callable[[LeakageOptions], None]) -> Callable[..., None]:
    """Return a command whose options are the fields of ``LeakageOptions``."""

    def run(**values: Any) -> None:  # noqa: ANN401  each by its type
        command(LeakageOptions(**values))

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = signature(LeakageOptions)  # type: ignore[attr-defined]
    return run
