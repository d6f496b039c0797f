"""``privpart costs --schedule``: which groups train in which round, and what a client spends."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from accounting import ConfigError
from privpart.cli.options import Format
from privpart.cli.output import as_csv, print_table

if TYPE_CHECKING:  # imported where used: other commands must start without torch
    from privpart.data.users import Users
    from privpart.plan import Rounds
    from privpart.training.plan_file import PlanFile
    from privpart.training.training import Training

_MEGA = 1e6
_GIGA = 1e9


def print_schedule(plan: Path, form: Format) -> None:
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

        costs = _costs(chosen, training(chosen), rounds)
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
        _print(rounds, groups, costs)


def _layers(names: tuple[str, ...]) -> list[str]:
    """Return the layers of parameters: conv1.weight and conv1.bias give conv1."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))


def _costs(plan: "PlanFile", setup: "Training", rounds: "Rounds") -> list[dict[str, Any]]:
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


def _print(rounds: "Rounds", groups: list[dict[str, Any]], costs: list[dict[str, Any]]) -> None:
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
