"""``privpart``: the command line and its exit codes.

    0    ok                            6    the run left its plan
    2    bad input                     7    an optional extra is missing
    3    budget exceeded               70   a fault of the machine, for instance a full disk
    4    audit threshold passed        130  interrupted; the run can be resumed
    5    the guarantee of a run does not hold, although it kept to its plan; or its folder, or a
         file given with it, is not what the run made; or an audit is void

Standard output carries only the result; progress, warnings and errors go to standard error.
"""

import os
import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

# Before torch and pydantic are imported: a folder on PYTHONPATH that has the metadata of a package
# would otherwise get its code run by commands that promise to import none of a plan's.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

import typer
from typer.core import TyperGroup

from accounting import ConfigError
from privpart.cli import audit
from privpart.cli.budget import calibrate, epsilon, mechanisms
from privpart.cli.budget_book import budget
from privpart.cli.costs import costs
from privpart.cli.demo import demo
from privpart.cli.doctor import doctor
from privpart.cli.export import export
from privpart.cli.frontier import frontier
from privpart.cli.idle import Command
from privpart.cli.init import init
from privpart.cli.output import say
from privpart.cli.report import report
from privpart.cli.sweep import sweep
from privpart.cli.train import train
from privpart.cli.tune import tune
from privpart.cli.verify import verify


class _Root(TyperGroup):
    """The command ``privpart``, whose commands' help shows the brackets that it is written with."""

    def main(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  click's, vendored
        """Escape what rich would take for markup, such as [table], and run the command."""
        _escape_help(self)
        return super().main(*args, **kwargs)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  click's, vendored
        """Take ``help COMMAND`` for ``COMMAND --help``."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)


def _escape_help(command: Any) -> None:  # noqa: ANN401  click's, vendored
    for part in (command, *command.params):
        part.help = re.sub(r"\[(?=[a-z#/@][^[]*\])", r"\[", part.help or "") or None
    for inner in getattr(command, "commands", {}).values():
        _escape_help(inner)


app = typer.Typer(
    cls=_Root,
    help="Differential privacy for partially trained models in federated learning.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
)
_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Budget": (epsilon, calibrate, mechanisms, budget, costs),
    "Train": (init, doctor, train),
    "Report": (report, verify, export),
    "Study": (sweep, frontier, tune, demo),
}
for _panel, _commands in _PANELS.items():
    for _command in _commands:
        app.command(cls=Command, rich_help_panel=_panel)(_command)
app.add_typer(audit.app, name="audit", rich_help_panel="Audit")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("privpart"))
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; print expected errors as one sentence, with the exit codes above."""
    try:
        app()
    except ConfigError as error:
        say(_as_option(str(error)))
        sys.exit(_REFUSED.get(type(error).__name__, 2))
    except ModuleNotFoundError as error:
        if error.name not in _HEAVY:
            raise
        say(f"this command needs {error.name}, which was left out: pip install privpart brings it.")
        sys.exit(_REFUSED["MissingExtraError"])
    except (RuntimeError, MemoryError) as error:
        # torch's allocator raises no specific type
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            say(_NO_MEMORY)
            sys.exit(2)
        if type(error).__name__ not in _EXPECTED_FAULTS:
            raise
        say(str(error))
        sys.exit(_FAULT)


# Errors whose message suffices without a traceback; by name, because their modules import torch.
_EXPECTED_FAULTS = (
    "StorageError",
    "MetricsError",
    "CohortTooSmallError",
    "CohortRefusedError",
    "DivergedError",
    "WorkerError",
)
_HEAVY = {
    *("torch", "opacus", "matplotlib", "jinja2"),
    *("sklearn", "filelock", "cryptography", "safetensors"),
}
"""Dependencies without which an epsilon can be computed; see the page on installing."""
_REFUSED = {"BudgetExceededError": 3, "MissingExtraError": 7}
"""Exit codes of what else is refused than bad input."""
_FAULT = 70
_NO_MEMORY = (
    "not enough memory. Use fewer rounds (a tree needs little memory) or a smaller network."
)


def _as_option(message: str) -> str:
    """Write the option as it is typed: ``max_epsilon=0: ...`` becomes ``--max-epsilon 0: ...``."""
    name, equals, rest = message.partition("=")
    # only of options: other messages have an equals sign, too
    if equals and name in _parameters(typer.main.get_command(app)):
        return f"--{name.replace('_', '-')} {rest}"
    return message


def _parameters(command: Any) -> set[str]:  # noqa: ANN401  click's, vendored
    """Names of every option and argument of a command and of those below it."""
    below = (_parameters(inner) for inner in getattr(command, "commands", {}).values())
    return {parameter.name for parameter in command.params}.union(*below)


if __name__ == "__main__":
    main()
