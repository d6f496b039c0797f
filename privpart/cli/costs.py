"""``privpart costs``: what partial training costs a client, beside full training.

Of one round, or with --schedule of all rounds of a plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from accounting import ConfigError
from privpart.cli import options
from privpart.cli.idle import beside, without
from privpart.cli.options import Format
from privpart.cli.output import print_result, print_table

if TYPE_CHECKING:  # imported where used: other commands must start without torch
    from privpart.client import LocalTraining
    from privpart.data.batches import Batch
    from privpart.data.users import Users
    from privpart.model import PartialModel
    from privpart.plan import Rounds
    from privpart.training.plan_file import PlanFile

_MEGA = 1e6
_GIGA = 1e9
_EXAMPLES = 100


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
        beside("schedule", "is over all rounds of the plan, beside full training"),
    ] = None,
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
    if (model is None) == (plan is None):
        fault = "is missing" if model is None else "--plan names a network as well"
        raise ConfigError(f"model: {fault}; name a network, or pass --plan FILE for your own.")
    if plan is None:
        subject = _of_model(str(model).replace("-", "_"), train)
    elif schedule:
        _print_schedule(plan, form)
        return
    else:
        subject = _of_plan(plan, train)
    from privpart.training.costs import DOWN, UP

    local, rows = subject.local, _rows(subject)
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
    passes = f"x {local.epochs}" if local.steps is None else f"in {local.steps} steps"
    title = (
        f"{subject.name}: one client in one round; {subject.examples} examples {passes}, batches "
        f"of {local.batch_size}, {local.optimizer}"
    )
    print_result(form, document, rows, lambda: _print_tables(rows, title))


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


def _of_model(name: str, train: Sequence[str] | None) -> _Subject:
    from privpart.client import LocalTraining
    from privpart.model import PartialModel
    from privpart.models import MODELS, example_batch, example_network

    if name not in MODELS:
        raise ConfigError(
            f"model {name!r} is unknown: must be one of {', '.join(MODELS)}. For your own pass "
            "--plan FILE."
        )
    network = MODELS[name]
    parts: dict[str, Sequence[str]] = {"full": ("*",)}
    parts |= {" ".join(train): train} if train else network.ladder

    def built(part: str) -> PartialModel:
        return PartialModel(
            lambda: example_network(name),
            train=parts[part],
            seed=0,
            initializers=network.initializers,
        )

    local = LocalTraining(0.1, loss=network.loss)
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


def _rows(subject: _Subject) -> list[dict[str, Any]]:
    """Return one row per trained part; the first is full training."""
    from privpart.training.costs import client_costs

    rows: list[dict[str, Any]] = []
    for part, train in subject.parts.items():
        costs = client_costs(
            subject.model(part), subject.batch, local=subject.local, examples=subject.examples
        )
        row = {"part": part, "train": " ".join(train)} | costs.to_dict()
        full = rows[0] if rows else row
        sent, sent_full = (values["bytes_down"] + values["bytes_up"] for values in (row, full))
        rows.append(row | {"reduction": sent_full / sent})
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


def _print_schedule(path: Path, form: Format) -> None:
    """Print a plan's schedule, and a client's bytes and FLOPs compared with full training.

    Code that the plan names is not imported; bytes and FLOPs are then left out.
    """
    from privpart.plan import active_rounds
    from privpart.training.plan_file import read

    plan = read(path)
    if plan.schedule is None:
        raise ConfigError(f"plan={path}: has no table [schedule]; every round trains everything.")
    patterns, counted = plan.model.grouped()
    builtin = plan.model.builtin is not None
    sizes: list[int | None] = list(counted) if builtin else [None] * len(counted)
    rounds = plan.schedule.rounds(len(sizes))
    names = [", ".join(_layers(group) if builtin else group) for group in patterns]
    groups = [
        {"group": g + 1, "layers": name, "numbers": size, "active_rounds": len(active)}
        for g, (name, size, active) in enumerate(
            zip(names, sizes, active_rounds(rounds), strict=True)
        )
    ]
    costs: list[dict[str, Any]] = []
    if plan.references():
        typer.echo(
            "privpart: this command does not import the plan's own code, so a client's bytes and "
            "FLOPs are left out.",
            err=True,
        )
    else:
        costs = _schedule_costs(plan, rounds)
    document = {
        "schema": "privpart/schedule/1",
        "rounds": [list(active) for active in rounds],
        "groups": groups,
        "costs": costs,
    }
    print_result(form, document, groups, lambda: _print_schedule_tables(rounds, groups, costs))


def _layers(names: tuple[str, ...]) -> list[str]:
    """Return the layers of parameters: conv1.weight and conv1.bias give conv1."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))


def _schedule_costs(plan: "PlanFile", rounds: "Rounds") -> list[dict[str, Any]]:
    from privpart.training.costs import run_costs
    from privpart.training.training import training

    setup = training(plan)
    users = cast("Users", setup.clients)  # of a built-in task
    examples = max(1, min(map(len, users.indices)))
    batch = slice(0, min(plan.client.batch_size, examples))
    everything = tuple(range(len(setup.model.group_sizes)))
    return [
        {
            "training": name,
            "rounds": len(rounds),
            **run_costs(
                setup.model,
                active,
                (users.x[batch], users.y[batch]),
                local=plan.client,
                examples=examples,
            ),
        }
        for name, active in (
            ("as scheduled", rounds),
            ("all rounds full", (everything,) * len(rounds)),
        )
    ]


def _print_schedule_tables(
    rounds: "Rounds", groups: list[dict[str, Any]], costs: list[dict[str, Any]]
) -> None:
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
        columns = {"bytes_up": _MEGA, "bytes_down": _MEGA, "flops": _GIGA}
        cells = [
            [row["training"], *(f"{row[name] / unit:.3f}" for name, unit in columns.items())]
            for row in costs
        ]
        print_table("A client in every round", ["", "MB up", "MB down", "GFLOP"], cells)
