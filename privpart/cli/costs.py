"""``privpart costs``: what partial training costs a client, beside full training.

Of one round, or of the mean round of a plan whose groups take turns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import ConfigError
from privpart.cli import options
from privpart.cli.output import Table, print_all, print_result

if TYPE_CHECKING:  # imported where used: other commands must start without torch
    from privpart.data.batches import Batch
    from privpart.model import PartialModel
    from privpart.plan import Rounds
    from privpart.settings.client import LocalTraining

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
    train: Annotated[
        list[str] | None,
        typer.Option(
            help="Pattern of trainable parameters; may be repeated. Without it, a network by name "
            "shows all steps of its freeze ladder."
        ),
    ] = None,
    html: options.HtmlOption = None,
    form: options.FormatOption = "table",
) -> None:
    """Report bytes, seconds, FLOPs and memory of one client in one round.

    Bytes are measured on encoded messages, FLOPs and memory on a local step that is run. Seconds
    are those of phones (Wang et al. 2021). A network by name is measured on a client with 100
    examples, one pass of plain SGD and batches of 16; a plan says its own. Of a plan with a
    schedule, it also shows which group trains in which round, and the mean over its rounds.

    Example: privpart costs emnist_cnn --train '!dense1.*'

    Example: privpart costs --plan examples/fedpart_digits.toml
    """
    if model is not None and plan is None:
        subject = _of_model(model.replace("-", "_"), train)
    elif plan is not None and model is None:
        subject = _of_plan(plan, train)
    else:
        fault = "is missing" if model is None else "--plan names a network as well"
        raise ConfigError(f"model: {fault}; name a network, or pass --plan FILE for your own.")
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
        "schedule": subject.schedule,
    }
    passes = f"x {local.epochs}" if local.steps is None else f"in {local.steps} steps"
    title = (
        f"{subject.name}: one client in one round; {subject.examples} examples {passes}, batches "
        f"of {local.batch_size}, {local.optimizer}"
    )
    tables = _tables(subject, rows, title)
    print_result(form, document, rows, lambda: print_all(tables))
    if html is not None:
        from privpart.cli.pages.decision import tables_page

        tables_page(f"Costs of {subject.name}", tables, answer=title).write(html)


@dataclass(frozen=True, slots=True)
class _Subject:
    """A network or plan (``name``), and a client that holds ``examples``, of which one batch.

    ``parts`` has the patterns of each part that may train, by name; the first is full training.
    ``rounds`` has the active groups of each round of the part ``scheduled``, if groups take turns.
    """

    name: str
    parts: dict[str, Sequence[str]]
    model: "Callable[[str], PartialModel]"
    batch: "Batch"
    local: "LocalTraining"
    examples: int
    scheduled: str = ""
    rounds: "Rounds | None" = None
    schedule: dict[str, Any] | None = None


def _of_model(name: str, train: Sequence[str] | None) -> _Subject:
    from privpart.model import PartialModel
    from privpart.models import MODELS, example_batch, example_network
    from privpart.settings.client import LocalTraining

    if name not in MODELS:
        raise ConfigError(
            f"model {name!r} is unknown: must be one of {', '.join(MODELS)}. For your own pass "
            "--plan FILE."
        )
    network = MODELS[name]
    parts: dict[str, Sequence[str]] = {"full": ("*",)}
    parts |= {" ".join(train): train} if train else network.ladder

    def built(part: str) -> PartialModel:
        initializers = network.initializers
        return PartialModel(
            lambda: example_network(name), train=parts[part], seed=0, initializers=initializers
        )

    local = LocalTraining(0.1, loss=network.loss)
    return _Subject(name, parts, built, example_batch(name, local.batch_size), local, _EXAMPLES)


def _of_plan(path: Path, train: Sequence[str] | None) -> _Subject:
    from copy import deepcopy

    import torch

    from privpart.cli.trainings import tell_of_code
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
    planned = plan.model.train or (["*"] if not setup.model.frozen else setup.model.trainable)
    as_planned = " ".join(planned)
    parts: dict[str, Sequence[str]] = {"full": ("*",), as_planned: planned}
    if {p.dtype for p in setup.model.module.parameters()} != {torch.float32}:
        del parts["full"]  # such a network could not train whole
    if train:
        parts[" ".join(train)] = train

    def built(part: str) -> PartialModel:
        module = deepcopy(setup.model.module)
        if part == as_planned:
            return plan.model.partial(module, groups=plan.groups())
        # what never leaves the client is part of the plan's own row only
        own = {"train": list(parts[part]), "local": []}
        return plan.model.model_copy(update=own).partial(module)

    subject = _Subject(str(path), parts, built, batch, local, examples, as_planned)
    if plan.schedule is None:
        return subject
    rounds = plan.schedule.rounds(len(setup.model.groups))
    return replace(subject, rounds=rounds, schedule=_schedule(setup.model, rounds))


def _schedule(model: "PartialModel", rounds: "Rounds") -> dict[str, Any]:
    """Return the active groups of each round, and a row per group."""
    from privpart.plan import active_rounds

    groups = zip(model.groups, model.group_sizes, active_rounds(rounds), strict=True)
    return {
        "rounds": [list(active) for active in rounds],
        "groups": [
            {
                "group": g,
                # conv1.weight and conv1.bias give conv1
                "layers": ", ".join(dict.fromkeys(n.rpartition(".")[0] or n for n in names)),
                "numbers": size,
                "active_rounds": len(active),
            }
            for g, (names, size, active) in enumerate(groups, start=1)
        ],
    }


def _rows(subject: _Subject) -> list[dict[str, Any]]:
    """Return one row per trained part; the first is full training."""
    from privpart.training.costs import client_costs

    rows: list[dict[str, Any]] = []
    for part, train in subject.parts.items():
        costs = client_costs(
            subject.model(part),
            subject.batch,
            local=subject.local,
            examples=subject.examples,
            rounds=subject.rounds if part == subject.scheduled else None,
        )
        row = {"part": part, "train": " ".join(train)} | costs.to_dict()
        full = rows[0] if rows else row
        sent, sent_full = (values["bytes_down"] + values["bytes_up"] for values in (row, full))
        rows.append(row | {"reduction": sent_full / sent})
    return rows


_ROUND = [
    *("part", "trains", "down MB", "up MB", "reduced", "down s", "up s"),
    *("GFLOP fwd", "GFLOP bwd"),
]
_MEMORY = {
    "total": "memory_bytes",
    "parameters": "parameters_bytes",
    "gradients": "gradients_bytes",
    "as received": "before_bytes",
    "optimizer": "optimizer_bytes",
    "activations": "activations_bytes",
}


def _tables(subject: _Subject, rows: Sequence[dict[str, Any]], title: str) -> list[Table]:
    tables = []
    if subject.schedule is not None:
        groups = [
            [f"#{row['group']} {row['layers']}", f"{row['numbers']:,}", str(row["active_rounds"])]
            for row in subject.schedule["groups"]
        ]
        tables.append(Table("Groups", ["layers", "parameters", "active rounds"], groups))
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
    tables.append(Table(title, _ROUND, cells, spare=("down s", "up s")))
    cells = [
        [row["part"], *(f"{row[name] / _MEGA:.2f}" for name in _MEMORY.values())] for row in rows
    ]
    return [*tables, Table("Memory of one local step, MB", ["part", *_MEMORY], cells)]
