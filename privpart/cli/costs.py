"""``privpart costs``: the costs of one round for one client, full and partial training compared."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from accounting import ConfigError, checks
from privpart.cli import options
from privpart.cli.idle import OF_A_PLAN, OF_SGD, beside, without
from privpart.cli.options import Format
from privpart.cli.output import as_csv, plain_console
from privpart.cli.schedule import print_schedule

if TYPE_CHECKING:  # imported where used: other commands must start without torch
    from rich.table import Table

    from privpart.client import LocalTraining
    from privpart.data.batches import Batch
    from privpart.model import PartialModel
    from privpart.training.costs import Bandwidth

_Cell = Callable[[dict[str, Any]], str]
_WORK = "Local training"
_LINK = "Network"
_MEGA = 1e6
_GIGA = 1e9
_LARGEST_BATCH = 65_536
_ONE_ROUND = beside("schedule", "is over all rounds of the plan, beside full training")


def costs(
    model: Annotated[
        str | None, typer.Argument(help="Name of a network, for instance emnist_cnn.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="Plan file in place of MODEL: its network, local training and first client. The "
            "code that it names is imported."
        ),
    ] = None,
    schedule: Annotated[
        bool,
        typer.Option(
            "--schedule",
            help="Show which group of a plan's [schedule] trains in which round, and what a client "
            "spends on all of them. Code that the plan names is not imported.",
        ),
        without("plan", "a schedule is part of a plan"),
    ] = False,
    train: Annotated[
        list[str] | None,
        typer.Option(help="Pattern of trainable parameters; may be repeated."),
        _ONE_ROUND,
    ] = None,
    ladder: Annotated[
        bool,
        typer.Option("--ladder", help="All steps of the freeze ladder; default without --train."),
        _ONE_ROUND,
    ] = False,
    examples: Annotated[
        int, typer.Option(help="Examples that a client holds.", rich_help_panel=_WORK), OF_A_PLAN
    ] = 100,
    epochs: Annotated[
        int, typer.Option(help="Passes over them.", rich_help_panel=_WORK), OF_A_PLAN
    ] = 1,
    batch_size: Annotated[
        int, typer.Option(help="Examples per local step.", rich_help_panel=_WORK), OF_A_PLAN
    ] = 16,
    optimizer: Annotated[
        Literal["sgd", "adam"],
        typer.Option(help="Optimizer of the client.", rich_help_panel=_WORK),
        OF_A_PLAN,
    ] = "sgd",
    momentum: Annotated[
        float, typer.Option(help="Momentum of sgd.", rich_help_panel=_WORK), (OF_A_PLAN, OF_SGD)
    ] = 0.0,
    down: Annotated[
        float,
        typer.Option(
            help="Download in MB/s; both defaults are from Wang et al. 2021.", rich_help_panel=_LINK
        ),
        _ONE_ROUND,
    ] = 0.75,
    up: Annotated[
        float, typer.Option(help="Upload in MB/s.", rich_help_panel=_LINK), _ONE_ROUND
    ] = 0.25,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Also measure time and memory of a local step on this machine."
        ),
        OF_A_PLAN,
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Also write a bar chart to this file (.png, .svg, .pdf)."),
        _ONE_ROUND,
    ] = None,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Report bytes, seconds, FLOPs and memory of one client in one round.

    Bytes are measured on encoded messages, FLOPs and memory on a local step that is run.

    Example: privpart costs emnist_cnn --train '!dense1.*'

    Example: privpart costs --plan plan.toml

    Example: privpart costs --plan examples/fedpart_digits.toml --schedule
    """
    from privpart.client import LocalTraining
    from privpart.training.costs import Bandwidth

    if plan is not None and schedule and model is None:
        print_schedule(plan, form)
        return
    bandwidth = Bandwidth(down * _MEGA, up * _MEGA)
    if plan is not None and model is not None:
        raise ConfigError(f"model={model}: --plan names a network as well; give one of them.")
    if plan is not None:
        subject = _of_plan(plan, train, ladder=ladder)
    else:
        local = LocalTraining(
            0.1, epochs=epochs, batch_size=batch_size, optimizer=optimizer, momentum=momentum
        )
        subject = _of_model(model, local, examples, train, ladder=ladder)
    name, local, examples = subject.name, subject.local, subject.examples
    epochs, batch_size, optimizer = local.epochs, local.batch_size, local.optimizer
    with _memory_for(batch_size):
        rows = _rows(subject, bandwidth, measure=measure)
    if plot is not None:
        from privpart.cli.pages.plots import draw_costs

        draw_costs(
            rows, title=f"{name}: one client, one round, as shares of full training", path=plot
        )
    if form is Format.JSON:
        document = {
            "schema": "privpart/costs/1",
            "model": name,
            "examples": examples,
            "epochs": epochs,
            "batch_size": batch_size,
            "optimizer": optimizer,
            "momentum": local.momentum,
            "bytes_per_second_down": bandwidth.down,
            "bytes_per_second_up": bandwidth.up,
            "rows": rows,
        }
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    elif form is Format.CSV:
        typer.echo(as_csv(rows), nl=False)
    else:
        passes = f"x {epochs}" if local.steps is None else f"in {local.steps} steps"
        of_a_client = f"{examples} examples {passes}, batches of {batch_size}, {optimizer}"
        _print_tables(rows, f"{name}: one client in one round; {of_a_client}")


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is measured.

    Attributes:
        name: of the network, or path of the plan.
        parts: name of a part -> its train patterns; the first is full training.
        model: returns the model that trains the named part.
        batch: one batch of the client.
        local: how the client trains.
        examples: how many examples the client holds.
    """

    name: str
    parts: dict[str, Sequence[str]]
    model: "Callable[[str], PartialModel]"
    batch: "Batch"
    local: "LocalTraining"
    examples: int


def _of_model(
    model: str | None,
    local: "LocalTraining",
    examples: int,
    train: Sequence[str] | None,
    *,
    ladder: bool,
) -> _Subject:
    from privpart.model import PartialModel
    from privpart.models import MODELS, example_batch, example_network

    if model is None:
        raise ConfigError("model: is missing; name a network, or pass --plan FILE for your own.")
    name = model.replace("-", "_")
    if name not in MODELS:
        raise ConfigError(
            f"model {model!r} is unknown: must be one of {', '.join(MODELS)}. For your own pass "
            "--plan FILE."
        )
    parts: dict[str, Sequence[str]] = {"full": ("*",)}
    if ladder or not train:
        parts |= MODELS[name].ladder
    if train:
        parts[" ".join(train)] = train

    def built(part: str) -> PartialModel:
        start_values = MODELS[name].initializers
        return PartialModel(
            lambda: example_network(name), train=parts[part], seed=0, initializers=start_values
        )

    with _memory_for(local.batch_size):
        # no batch is larger than what the client holds
        batch = example_batch(name, min(local.batch_size, checks.count("examples", examples)))
    return _Subject(name, parts, built, batch, replace(local, loss=MODELS[name].loss), examples)


def _of_plan(path: Path, train: Sequence[str] | None, *, ladder: bool) -> _Subject:
    from copy import deepcopy

    from privpart.cli.train import tell_of_code
    from privpart.model import PartialModel
    from privpart.patterns import freeze_ladder
    from privpart.training.plan_file import read
    from privpart.training.training import first_batch, training

    plan = read(path)
    if plan.select is not None:
        raise ConfigError(
            f"plan={path}: its clients select what they download, which this command does not "
            "measure; `privpart train` counts it in each round."
        )
    tell_of_code(plan)
    setup = training(plan, report=lambda _: None)
    local = setup.engine.local_of(0)
    batch, examples = first_batch(setup.clients, local)
    as_planned = " ".join(plan.model.train)
    parts: dict[str, Sequence[str]] = {"full": ("*",), as_planned: plan.model.train}
    if ladder:
        own = plan.model.builtin
        parts |= freeze_ladder(setup.model.module) if own is None else own.ladder
    if train:
        parts[" ".join(train)] = train

    def built(part: str) -> PartialModel:
        # what never leaves the client is part of the plan's own row only
        local_part = plan.model.local if part == as_planned else []
        table = plan.model.model_copy(update={"train": list(parts[part]), "local": local_part})
        return table.partial(deepcopy(setup.model.module))

    return _Subject(str(path), parts, built, batch, local, examples)


@contextmanager
def _memory_for(batch_size: int) -> Iterator[None]:
    if batch_size > _LARGEST_BATCH:
        raise ConfigError(f"batch_size={batch_size}: must be at most {_LARGEST_BATCH}.")
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch's allocator raises no specific type
        if not isinstance(error, MemoryError) and "allocate" not in str(error):
            raise
        raise ConfigError(
            f"batch_size={batch_size}: a step on that many examples does not fit into memory. Use "
            "a smaller batch."
        ) from None


def _rows(subject: _Subject, bandwidth: "Bandwidth", *, measure: bool) -> list[dict[str, Any]]:
    """Return one row per trained part; the first is full training."""
    from privpart.data.batches import count_rows
    from privpart.training.costs import client_costs
    from privpart.training.measured_step import measured_step

    local, rows = subject.local, list[dict[str, Any]]()
    one_batch = count_rows(subject.batch)
    for part, train in subject.parts.items():
        typer.echo(f"measuring {part} ...", err=True)
        found = client_costs(
            subject.model(part), subject.batch, local=local, examples=subject.examples
        )
        row = {"part": part, "train": " ".join(train)} | found.to_dict(bandwidth)
        sent = row["bytes_down"] + row["bytes_up"]
        full = rows[0] if rows else row
        row["reduction"] = (full["bytes_down"] + full["bytes_up"]) / sent
        if measure:
            step = measured_step(subject.name, train, local=replace(local, batch_size=one_batch))
            row["measured_step_seconds"] = step.median_seconds
            row["measured_peak_bytes"] = step.peak_bytes
        rows.append(row)
    return rows


def _print_tables(rows: Sequence[dict[str, Any]], title: str) -> None:

    console = plain_console(100)
    network: dict[str, _Cell] = {
        "trains": lambda r: f"{100 * r['trained'] / r['numbers']:.2f} %",
        "down MB": lambda r: f"{r['bytes_down'] / _MEGA:.3f}",
        "up MB": lambda r: f"{r['bytes_up'] / _MEGA:.3f}",
        "reduced": lambda r: f"{r['reduction']:.1f}x",
        "down s": lambda r: f"{r['seconds_down']:.2f}",
        "up s": lambda r: f"{r['seconds_up']:.2f}",
        "GFLOP fwd": lambda r: f"{r['forward_flops'] / _GIGA:.2f}",
        "GFLOP bwd": lambda r: f"{r['backward_flops'] / _GIGA:.2f}",
    }
    memory: dict[str, _Cell] = {
        "total": lambda r: f"{r['memory_bytes'] / _MEGA:.2f}",
        "parameters": lambda r: f"{r['parameters_bytes'] / _MEGA:.2f}",
        "gradients": lambda r: f"{r['gradients_bytes'] / _MEGA:.2f}",
        "as received": lambda r: f"{r['before_bytes'] / _MEGA:.2f}",
        "optimizer": lambda r: f"{r['optimizer_bytes'] / _MEGA:.2f}",
        "activations": lambda r: f"{r['activations_bytes'] / _MEGA:.2f}",
    }
    measured: dict[str, _Cell] = {
        "resident MB": lambda r: f"{r['measured_peak_bytes'] / _MEGA:.1f}",
        "processor s": lambda r: f"{r['measured_step_seconds']:.3f}",
    }
    console.print(_table(title, rows, network))
    console.print(_table("Memory of one local step, MB", rows, memory))
    if "measured_peak_bytes" in rows[0]:
        console.print(_table("One local step on this machine, one processor", rows, measured))


def _table(
    title: str,
    rows: Sequence[dict[str, Any]],
    columns: Mapping[str, _Cell],
) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    table.add_column("part", min_width=14, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row["part"], *(cell(row) for cell in columns.values()))
    return table
