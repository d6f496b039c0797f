"""``privpart inspect``: FedPart's diagnostics of a run, and its pictures."""

import json
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import ConfigError, checks
from privpart.cli import options
from privpart.cli.options import Format
from privpart.cli.output import as_csv

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from torch import Tensor

    from privpart.plan_file import PlanFile
    from privpart.training import Training

_EXAMPLES, _MASKS = 64, 40


def inspect(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures; made if missing.")],
    rounds: Annotated[
        int, typer.Option(help="Rounds of one client to watch the step sizes of.")
    ] = 6,
    channels: Annotated[int, typer.Option(help="Channels per layer to draw features of.")] = 4,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Look into a run's model: step sizes around averaging, gradient masks, features, kernels.

    Reads test images and simulated clients; nothing of it is covered by the run's guarantee.

    Example: privpart inspect run --out pictures
    """
    from privpart.cli import inspect_plots

    if checks.count("rounds", rounds) < 2:
        raise ConfigError(f"rounds={rounds}: must be at least 2, with averaging in between.")
    checks.count("channels", channels)
    plan, setup, parameters = _opened(run)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be made: {error}.") from None
    setup.model.load(parameters)
    steps = _steps(setup, parameters, rounds)
    kernels, features = _kernels(setup), _features(setup, channels)
    rows = _figures(plan, setup, steps)
    inspect_plots.steps(steps, out / "steps.png")
    if kernels is not None:
        inspect_plots.grid(kernels, out / "kernels.png")
    inspect_plots.grid([image for images in features.values() for image in images],
                       out / "features.png")  # fmt: skip
    if form is Format.JSON:
        document = {"schema": "privpart/inspect/1", "steps": steps, "figures": rows}
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    elif form is Format.CSV:
        typer.echo(as_csv(rows), nl=False)
    else:
        for row in rows:
            typer.echo(f"  {row['name']:<44} {row['value']:.4g}")
        typer.echo(f"  pictures in {out}; not covered by the run's guarantee")


def _opened(run: Path) -> "tuple[PlanFile, Training, Tensor]":
    """A run's plan, its set-up, and the trained part of its newest state; changes nothing."""
    from privpart import state_file
    from privpart.ledger import Ledger
    from privpart.plan_file import parse
    from privpart.run_folder import state_name
    from privpart.training import training

    ledger = Ledger(run / "ledger.sqlite", read_only=True)
    try:
        text, rows = ledger.facts.get("plan_file"), ledger.rows()
    finally:
        ledger.close()
    if text is None:
        raise ConfigError(f"{run}: was not begun by a plan file, so its network is not known.")
    plan = parse(text, name=f"the plan of {run}")
    if not rows:
        raise ConfigError(f"{run}: no round of it was committed yet.")
    tensors, _ = state_file.read(run / state_name(len(rows)), rows[-1].state)
    setup = training(plan)
    return plan, setup, setup.whole(tensors["parameters"])


def _steps(setup: "Training", parameters: "Tensor", rounds: int) -> dict[str, list[list[float]]]:
    """Step sizes of the first clients when all train, and when the groups take turns."""
    from privpart.engines.local_work import client_generator
    from privpart.inspect import step_sizes

    groups = len(setup.model.group_sizes)
    cohort = tuple(range(min(5, len(setup.engine.users))))
    turns: dict[str, list[tuple[int, ...] | None]] = {"full": [None] * rounds}
    if groups > 1:
        turns["partial"] = [(r // 2 % groups,) for r in range(rounds)]
    found: dict[str, list[list[float]]] = {}
    for name, actives in turns.items():
        now, found[name] = parameters.clone(), []
        for number, active in enumerate(actives):
            spans, total = setup.model.spans(active), 0
            deltas = []
            for client in cohort:
                delta, sizes = step_sizes(
                    setup.model,
                    now,
                    *setup.engine.users.examples(client),
                    local=setup.engine.local_of(number),
                    generator=client_generator(setup.engine.data_seed, number, client),
                    active=active,
                )
                deltas.append(delta)
                found[name] += [sizes] if len(deltas) == 1 else []
            mean = sum(deltas[1:], deltas[0]) / len(deltas)
            for span in spans:
                now[span] += mean[total : total + span.stop - span.start]
                total += span.stop - span.start
    setup.model.load(parameters)
    return found


def _figures(
    plan: "PlanFile", setup: "Training", steps: dict[str, list[list[float]]]
) -> list[dict[str, Any]]:
    import torch

    from privpart.inspect import jump_after_averaging, mask_ratio

    rows = [
        # two rounds of the same layers: from one group to the next there is nothing to compare
        {
            "name": f"first step / last step before, {name}",
            "value": fmean(
                jump_after_averaging(each[r : r + 2]) for r in range(0, len(each) - 1, 2)
            ),
        }
        for name, each in steps.items()
    ]
    if len(setup.model.group_sizes) > 1:
        found = mask_ratio(
            setup.model,
            setup.test_x[:_EXAMPLES],
            setup.test_y[:_EXAMPLES],
            masks=_MASKS,
            generator=torch.Generator().manual_seed(plan.model.seed % 2**63),
        )
        rows += [
            {"name": "Assumption 3, k of random masks", "value": found.random},
            {"name": "Assumption 3, k of the layers' masks", "value": found.groups},
        ]
    return rows


def _kernels(setup: "Training") -> "list[Tensor] | None":
    from privpart.inspect import first_kernels

    try:
        return [kernel.mean(dim=0) for kernel in first_kernels(setup.model.module)][:32]
    except ConfigError:
        return None


def _features(setup: "Training", channels: int) -> "dict[str, list[Tensor]]":
    """Per weight layer, the images that excite its first channels, from one grey start."""
    import torch
    from torch import nn

    from privpart.inspect import maximal_activation

    start = torch.full_like(setup.test_x[0], 0.5)
    start += 0.01 * torch.randn(start.shape, generator=torch.Generator().manual_seed(0))
    found: dict[str, list[torch.Tensor]] = {}
    for name, layer in setup.model.module.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            found[name] = [
                maximal_activation(setup.model.module, name, c, start)
                for c in range(min(channels, layer.weight.shape[0]))
            ]
    return found
