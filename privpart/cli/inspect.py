"""``privpart inspect``: FedPart's diagnostics of a run, or of two, and its pictures."""

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

    from privpart.experiment.plan_file import PlanFile
    from privpart.experiment.training import Training

    Features = dict[str, list[Tensor]]  # by layer, an image per channel

_EXAMPLES, _MASKS = 64, 40


def inspect(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures; made if missing.")],
    rounds: Annotated[
        int, typer.Option(help="Rounds of one client to watch the step sizes of.")
    ] = 6,
    channels: Annotated[int, typer.Option(help="Channels per layer to draw features of.")] = 4,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Another run from the same start weights: compare what excites the channels."
        ),
    ] = None,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Look into a run's model: step sizes around averaging, gradient masks, features, kernels.

    With --against, the similarity (SSIM) of the features of two runs, layer by layer, as in
    FedPart's Table 8. Reads test images and simulated clients; nothing of it is covered by the
    run's guarantee.

    Example: privpart inspect run --out pictures
    """
    if checks.count("rounds", rounds) < 2:
        raise ConfigError(f"rounds={rounds}: must be at least 2, with averaging in between.")
    checks.count("channels", channels)
    plan, setup, parameters = _opened(run)
    if not setup.test_x.is_floating_point():
        raise ConfigError(f"{run}: trains on words; inspect draws images, and has none of these.")
    other = None if against is None else _comparable(against, plan, setup)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be made: {error}.") from None
    start = setup.model.flat.clone()
    setup.model.load(parameters)
    steps = _steps(setup, parameters, rounds)
    rows = _figures(plan, setup, steps)
    features = {"run": _features(setup, channels)}
    if other is not None:
        features["against"] = _features(other, channels)
        setup.model.load(start)
        features["untrained"] = _features(setup, channels)
        setup.model.load(parameters)
        rows += _similarities(**features)
    _draw(out, steps, features, {"kernels": setup, "kernels-against": other})
    if form is Format.JSON:
        document = {"schema": "privpart/inspect/1", "steps": steps, "figures": rows}
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
    elif form is Format.CSV:
        typer.echo(as_csv(rows), nl=False)
    else:
        lines = [f"  {row['name']:<44} {row['value']:.4g}" for row in rows]
        lines += [_TABLE_8] if other is not None else []
        lines += [f"  pictures in {out}; not covered by the run's guarantee"]
        typer.echo("\n".join(lines))


_TABLE_8 = """
  SSIM: of the images that most excite a channel, mean over the first channels of each layer, from
  the same start image. FedPart's Table 8 compares so FedAvg after 100 rounds with FedPart, layers
  #1 and #10 of ResNet-8 on CIFAR-100. "untrained" is the control: how like the run's images are to
  those of the weights that both runs began with."""


def _comparable(run: Path, plan: "PlanFile", setup: "Training") -> "Training":
    """The other run's network, trained; its channels must be those of the first."""
    theirs, other, parameters = _opened(run)
    keys = ("name", "sizes", "seed")
    ours, found = ([getattr(p.model, key) for key in keys] for p in (plan, theirs))
    if ours != found or setup.test_x.shape[1:] != other.test_x.shape[1:]:
        raise ConfigError(
            f"against={run}: has another network, other start weights (model.seed) or images of "
            "another shape, so its channels do not correspond. Compare runs that agree in these."
        )
    other.model.load(parameters)
    return other


def _similarities(
    run: "Features", against: "Features", untrained: "Features"
) -> list[dict[str, Any]]:
    import torch

    from attacks import ssim

    return [
        {
            "name": f"SSIM, {layer}, run and {name}",
            "value": float(ssim(torch.stack(images), torch.stack(second[layer])).mean()),
        }
        for layer, images in run.items()
        for name, second in (("against", against), ("untrained", untrained))
    ]


def _draw(
    out: Path,
    steps: dict[str, list[list[float]]],
    features: "dict[str, Features]",
    kernels_of: "dict[str, Training | None]",
) -> None:
    from privpart.cli import plots

    plots.draw_steps(steps, out / "steps.png")
    several = len(features) > 1
    plots.draw_rows(
        {
            f"{layer}, {name}" if several else layer: found[layer]
            for layer in features["run"]
            for name, found in features.items()
        },
        out / "features.png",
    )
    for name, setup in kernels_of.items():
        if setup is not None and (kernels := _kernels(setup)) is not None:
            plots.draw_grid(kernels, out / f"{name}.png")


def _opened(run: Path) -> "tuple[PlanFile, Training, Tensor]":
    """A run's plan, its set-up, and the trained part of its newest state; changes nothing."""
    from privpart.experiment.plan_file import parse
    from privpart.experiment.training import training
    from privpart.run.files import read_state
    from privpart.run.folder import state_name
    from privpart.run.ledger import Ledger

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
    tensors, _ = read_state(run / state_name(len(rows)), rows[-1].state)
    setup = training(plan)
    return plan, setup, setup.whole(tensors["parameters"])


def _steps(setup: "Training", parameters: "Tensor", rounds: int) -> dict[str, list[list[float]]]:
    """Step sizes of the first clients when all train, and when the groups take turns."""
    from privpart.engines.methods import client_generator
    from privpart.measure.inspect import step_sizes

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

    from privpart.measure.inspect import jump_after_averaging, mask_ratio

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
    """The first ones: in colour if the images are, else the mean over the inputs."""
    from privpart.measure.inspect import first_kernels

    try:
        found = list(first_kernels(setup.model.module))[:32]
        return [kernel if len(kernel) == 3 else kernel.mean(dim=0) for kernel in found]
    except ConfigError:
        return None


def _features(setup: "Training", channels: int) -> "Features":
    """Per weight layer, the images that excite its first channels, from one grey start."""
    import torch
    from torch import nn

    from privpart.measure.inspect import maximal_activation

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
