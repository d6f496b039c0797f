"""``privpart costs``: what partial training costs a client, beside full training.

Of one round, or with --schedule of all rounds of a plan.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from accounting import ConfigError
from privpart.cli import options
from privpart.cli.idle import OF_A_PLAN, beside, without
from privpart.cli.options import Format
from privpart.cli.output import as_csv, print_table

if TYPE_CHECKING:  # imported where used: other commands must start without torch
    from privpart.client import LocalTraining
    from privpart.data.batches import Batch
    from privpart.data.users import Users
    from privpart.model import PartialModel
    from privpart.plan import Rounds
    from privpart.training.plan_file import PlanFile
    from privpart.training.training import Training

_MEGA = 1e6
_GIGA = 1e9
_EXAMPLES = 100
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
        typer.Option(
            help="Pattern of trainable parameters; may be repeated. Without it, a network by name "
            "shows all steps of its freeze ladder."
        ),
        _ONE_ROUND,
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Also measure time and memory of a local step on this machine."
        ),
        OF_A_PLAN,
    ] = False,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Report bytes, seconds, FLOPs and memory of one client in one round.

    Bytes are measured on encoded messages, FLOPs and memory on a local step that is run. Seconds
    are those of phones (Wang et al. 2021). A network by name is measured on a client with 100
    examples, one pass of plain SGD and batches of 16; a plan says its own.

    Example: privpart costs emnist_cnn --train '!dense1.*'

    Example: privpart costs --plan plan.toml

    Example: privpart costs --plan examples/fedpart_digits.toml --schedule
    """
    from privpart.training.costs import DOWN, UP

    if plan is not None and schedule and model is None:
        _print_schedule(plan, form)
        return
    if plan is not None and model is not None:
        raise ConfigError(f"model={model}: --plan names a network as well; give one of them.")
    subject = _of_model(model, train) if plan is None else _of_plan(plan, train)
    local = subject.local
    rows = _rows(subject, measure=measure)
    if form is Format.JSON:
        document = {
            "schema": "privpart/costs/1",
            "model": subject.name,
            "examples": subject.examples,
            "epochs": local.epochs,
            "batch_size": local.batch_size,
            "optimizer": local.optimizer,
            "momentum": local.momentum,
            "bytes_per_second_down": DOWN,
            "bytes_per_second_up": UP,
            "rows": rows,
        }
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    elif form is Format.CSV:
        typer.echo(as_csv(rows), nl=False)
    else:
        passes = f"x {local.epochs}" if local.steps is None else f"in {local.steps} steps"
        batches = f"batches of {local.batch_size}, {local.optimizer}"
        one = f"one client in one round; {subject.examples} examples {passes}, {batches}"
        _print_tables(rows, f"{subject.name}: {one}")


@dataclass(frozen=True, slots=True)
class _Subject:
    """A network or plan (``name``), and a client that holds ``examples``, of which one batch.

    ``parts`` has the patterns of each part that may train, by name; the first is full training.
    """

    name: str
    parts: dict[str, Sequence[str]]
    model: "Callable[[str], PartialModel]"
    batch: "Batch"
    local: "LocalTraining"
    examples: int


def _of_model(model: str | None, train: Sequence[str] | None) -> _Subject:
    from privpart.client import LocalTraining
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
    parts |= {" ".join(train): train} if train else MODELS[name].ladder

    def built(part: str) -> PartialModel:
        start_values = MODELS[name].initializers
        return PartialModel(
            lambda: example_network(name), train=parts[part], seed=0, initializers=start_values
        )

    local = LocalTraining(0.1, loss=MODELS[name].loss)
    return _Subject(name, parts, built, example_batch(name, local.batch_size), local, _EXAMPLES)


def _of_plan(path: Path, train: Sequence[str] | None) -> _Subject:
    from copy import deepcopy

    from privpart.cli.train import tell_of_code
    from privpart.model import PartialModel
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
    if train:
        parts[" ".join(train)] = train

    def built(part: str) -> PartialModel:
        # what never leaves the client is part of the plan's own row only
        local_part = plan.model.local if part == as_planned else []
        table = plan.model.model_copy(update={"train": list(parts[part]), "local": local_part})
        return table.partial(deepcopy(setup.model.module))

    return _Subject(str(path), parts, built, batch, local, examples)


def _rows(subject: _Subject, *, measure: bool) -> list[dict[str, Any]]:
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
        row = {"part": part, "train": " ".join(train)} | found.to_dict()
        sent = row["bytes_down"] + row["bytes_up"]
        full = rows[0] if rows else row
        row["reduction"] = (full["bytes_down"] + full["bytes_up"]) / sent
        if measure:
            step = measured_step(subject.name, train, local=replace(local, batch_size=one_batch))
            row["measured_step_seconds"] = step.median_seconds
            row["measured_peak_bytes"] = step.peak_bytes
        rows.append(row)
    return rows


_ROUND = [
    "part",
    "trains",
    "down MB",
    "up MB",
    "reduced",
    "down s",
    "up s",
    "GFLOP fwd",
    "GFLOP bwd",
]
_MEMORY = {
    "total": "memory_bytes",
    "parameters": "parameters_bytes",
    "gradients": "gradients_bytes",
    "as received": "before_bytes",
    "optimizer": "optimizer_bytes",
    "activations": "activations_bytes",
}


def _print_tables(rows: Sequence[dict[str, Any]], title: str) -> None:
    cells = [
        [
            row["part"],
            f"{100 * row['trained'] / row['numbers']:.2f} %",
            *(f"{row[name] / _MEGA:.3f}" for name in ("bytes_down", "bytes_up")),
            f"{row['reduction']:.1f}x",
            *(f"{row[name]:.2f}" for name in ("seconds_down", "seconds_up")),
            *(f"{row[name] / _GIGA:.2f}" for name in ("forward_flops", "backward_flops")),
        ]
        for row in rows
    ]
    print_table(title, _ROUND, cells, spare=("down s", "up s"))
    cells = [
        [row["part"], *(f"{row[name] / _MEGA:.2f}" for name in _MEMORY.values())] for row in rows
    ]
    print_table("Memory of one local step, MB", ["part", *_MEMORY], cells)
    if "measured_peak_bytes" in rows[0]:
        cells = [
            [
                row["part"],
                f"{row['measured_peak_bytes'] / _MEGA:.1f}",
                f"{row['measured_step_seconds']:.3f}",
            ]
            for row in rows
        ]
        title = "One local step on this machine, one processor"
        print_table(title, ["part", "resident MB", "processor s"], cells)


def _print_schedule(plan: Path, form: Format) -> None:
    """Print a plan's schedule, and a client's bytes and FLOPs compared with full training.

    Code that the plan names is not imported; bytes and FLOPs are then left out.
    """
    from privpart.plan import active_rounds
    from privpart.training.plan_file import read

    chosen = read(plan)
    if chosen.schedule is None:
        raise ConfigError(f"plan={plan}: has no table [schedule]; every round trains everything.")
    patterns, found = chosen.model.grouped()
    builtin = chosen.model.builtin is not None
    sizes: list[int | None] = list(found) if builtin else [None] * len(found)
    rounds = chosen.schedule.rounds(len(sizes))
    names = [", ".join(_layers(own) if builtin else own) for own in patterns]
    groups = [
        {"group": g + 1, "layers": name, "numbers": size, "active_rounds": len(own)}
        for g, (name, size, own) in enumerate(zip(names, sizes, active_rounds(rounds), strict=True))
    ]
    costs: list[dict[str, Any]] = []
    if chosen.references():
        typer.echo(
            "privpart: this command does not import the plan's own code, so a client's bytes and "
            "FLOPs are left out.",
            err=True,
        )
    else:
        from privpart.training.training import training

        costs = _schedule_costs(chosen, training(chosen), rounds)
    if form is Format.JSON:
        document = {
            "schema": "privpart/schedule/1",
            "rounds": [list(active) for active in rounds],
            "groups": groups,
            "costs": costs,
        }
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    elif form is Format.CSV:
        typer.echo(as_csv(groups), nl=False)
    else:
        _print_schedule_tables(rounds, groups, costs)


def _layers(names: tuple[str, ...]) -> list[str]:
    """Return the layers of parameters: conv1.weight and conv1.bias give conv1."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))


def _schedule_costs(plan: "PlanFile", setup: "Training", rounds: "Rounds") -> list[dict[str, Any]]:
    from privpart.training.costs import computation_share, run_costs

    users = cast("Users", setup.clients)  # of a built-in task
    groups = len(setup.model.group_sizes)
    held = max(1, min(map(len, users.indices)))
    batch = slice(0, min(plan.client.batch_size, held))
    everything = tuple(range(groups))
    rows = []
    for name, own in (("as scheduled", rounds), ("all rounds full", (everything,) * len(rounds))):
        found = run_costs(
            setup.model,
            own,
            (users.x[batch], users.y[batch]),
            local=plan.client,
            examples=held,
        )
        rows.append(
            {
                "training": name,
                "rounds": found.rounds,
                "bytes_up": found.bytes_up,
                "bytes_down_whole": found.bytes_down_whole,
                "bytes_down_changed": found.bytes_down_changed,
                "flops": found.flops,
                "equation_6": sum(computation_share(active, groups) for active in own) / len(own),
            }
        )
    return rows


def _print_schedule_tables(
    rounds: "Rounds", groups: list[dict[str, Any]], costs: list[dict[str, Any]]
) -> None:
    from privpart.plan import strip_chart

    typer.echo(strip_chart(rounds, width=90) + "\n")
    cells = [
        [
            f"#{row['group']} {row['layers']}",
            "" if row["numbers"] is None else f"{row['numbers']:,}",
            f"{row['active_rounds']}",
        ]
        for row in groups
    ]
    print_table("Groups", ["layers", "parameters", "active rounds"], cells)
    if costs:
        columns = {"bytes_up": _MEGA, "bytes_down_whole": _MEGA, "bytes_down_changed": _MEGA}
        columns |= {"flops": _GIGA, "equation_6": 1}
        cells = [
            [row["training"], *(f"{row[name] / unit:.3f}" for name, unit in columns.items())]
            for row in costs
        ]
        header = ["", "MB up", "MB down, whole", "MB down, changed", "GFLOP", "Eq. 6"]
        print_table("A client in every round", header, cells)
