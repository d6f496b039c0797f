"""``privpart audit inspect``: FedPart's diagnostics of one run or of two, with pictures."""

import json
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from accounting import ConfigError, checks
from privpart.cli import options
from privpart.cli.options import Format
from privpart.cli.output import as_csv

if TYPE_CHECKING:  # imported where used: other commands must start without torch
    from torch import Tensor

    from privpart.training.plan_file import PlanFile
    from privpart.training.training import Training

    Features = dict[str, list[Tensor]]  # layer -> one image per channel

_EXAMPLES = 64
_MASKS = 40


def inspect(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures; created if missing.")],
    rounds: Annotated[
        int, typer.Option(help="Rounds in which to measure one client's step sizes.")
    ] = 6,
    channels: Annotated[int, typer.Option(help="Channels per layer whose features are drawn.")] = 4,
    against: Annotated[
        Path | None,
        typer.Option(help="Another run with the same start values, whose features are compared."),
    ] = None,
    form: options.FormatOption = Format.TABLE,
) -> None:
    """Diagnose a run's model: step sizes around averaging, gradient masks, features, kernels.

    With --against, also print the similarity (SSIM) of two runs' features by layer, as in FedPart's
    Table 8. The command reads test images and clients' data, and imports the code that
    the plan names; the run's guarantee does not cover its
    results.

    Example: privpart audit inspect run --out pictures
    """
    if checks.count("rounds", rounds) < 2:
        raise ConfigError(f"rounds={rounds}: must be at least 2, to see the effect of averaging.")
    checks.count("channels", channels)
    plan, setup, parameters = _opened(run)
    images = _images(setup, run)
    other = None if against is None else _comparable(against, plan, setup)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be created: {error}.") from None
    start = setup.model.flat.clone()
    setup.model.load(parameters)
    steps = _steps(setup, parameters, rounds)
    rows = _figures(plan, setup, images, steps)
    features = {"run": _features(setup, images[0][0], channels)}
    if other is not None:
        features["against"] = _features(other, images[0][0], channels)
        setup.model.load(start)
        features["untrained"] = _features(setup, images[0][0], channels)
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
        lines += [f"  pictures in {out}; the run's guarantee does not cover them"]
        typer.echo("\n".join(lines))


_TABLE_8 = """
  SSIM compares the images that maximise a channel's activation, from one start image; mean over the
  first channels of each layer. FedPart's Table 8 does so for FedAvg after 100 rounds and FedPart,
  layers #1 and #10 of ResNet-8 on CIFAR-100. The control "untrained" compares the run's images with
  those of the start values of both runs."""


def _comparable(run: Path, plan: "PlanFile", setup: "Training") -> "Training":
    """Return the trained network of another run; refuse one whose channels do not correspond."""
    theirs, other, parameters = _opened(run)
    keys = ("name", "factory", "sizes", "weights", "keep", "seed")
    ours, found = ([getattr(p.model, key) for key in keys] for p in (plan, theirs))
    shapes = {_images(own, run)[0].shape[1:] for own in (setup, other)}
    if ours != found or len(shapes) > 1:
        raise ConfigError(
            f"against={run}: differs in network, start values (model.seed) or shape of images, so "
            "its channels do not correspond. Compare runs that agree in these."
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
    from privpart.cli.pages import plots

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
    """Return a run's plan, training and newest parameters, without changing the run."""
    from privpart.cli.train import tell_of_code
    from privpart.training.export import released_parameters
    from privpart.training.train import released_setup

    parameters, facts = released_parameters(run)
    if "plan_file" not in facts and "plan_tables" not in facts:
        raise ConfigError(f"{run}: was not started from a plan file, so its network is unknown.")
    setup = released_setup(run, tell=tell_of_code)
    return setup.plan, setup, setup.whole(parameters)


def _images(setup: "Training", run: Path) -> "tuple[Tensor, Tensor]":
    """Return test images and labels; the first client's examples where the metric has none.

    Raises:
        ConfigError: the run does not train on images with labels.
    """
    from torch import Tensor

    from privpart.training.metric import Accuracy
    from privpart.training.training import first_batch

    if isinstance(setup.metric, Accuracy):
        found: Any = setup.test
    else:
        found, _ = first_batch(setup.clients, setup.engine.local_of(0))
    pair = isinstance(found, tuple | list) and len(found) == 2
    x, y = found if pair else (None, None)
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.is_floating_point() and x.dim() == 4:
        return x, y
    raise ConfigError(
        f"{run}: trains on other examples than images; inspect needs pairs of images, float32 of "
        "shape (n, channels, height, width), and labels."
    )


def _steps(setup: "Training", parameters: "Tensor", rounds: int) -> dict[str, list[list[float]]]:
    """Return the first client's step sizes when all groups train, and when they take turns."""
    from privpart.engines.methods import client_generator, fetched
    from privpart.messages import client_id
    from privpart.training.diagnostics import step_sizes

    groups = len(setup.model.group_sizes)
    cohort = [client_id(one) for one in setup.clients.ids[:5]]
    turns: dict[str, list[tuple[int, ...] | None]] = {"full": [None] * rounds}
    if groups > 1:
        turns["partial"] = [(r // 2 % groups,) for r in range(rounds)]
    found: dict[str, list[list[float]]] = {}
    for name, actives in turns.items():
        now = parameters.clone()
        found[name] = []
        for number, active in enumerate(actives):
            updates = []
            for client in cohort:
                generator = client_generator(setup.engine.data_seed, number, client)
                update, sizes = step_sizes(
                    setup.model,
                    now,
                    fetched(setup.clients, client, generator),
                    local=setup.engine.local_of(number),
                    generator=generator,
                    active=active,
                )
                updates.append(update)
                if client == cohort[0]:
                    found[name].append(sizes)
            mean = sum(updates[1:], updates[0]) / len(updates)
            begin = 0
            for span in setup.model.spans(active):
                length = span.stop - span.start
                now[span] += mean[begin : begin + length]
                begin += length
    setup.model.load(parameters)
    return found


def _figures(
    plan: "PlanFile",
    setup: "Training",
    images: "tuple[Tensor, Tensor]",
    steps: dict[str, list[list[float]]],
) -> list[dict[str, Any]]:
    import torch

    from privpart.training.diagnostics import jump_after_averaging, mask_ratio

    rows = [
        # pairs of rounds that train the same group: steps of different groups are not comparable
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
            (images[0][:_EXAMPLES], images[1][:_EXAMPLES]),
            masks=_MASKS,
            loss=setup.engine.local_of(0).loss,
            generator=torch.Generator().manual_seed((plan.model.seed or 0) % 2**63),
        )
        rows += [
            {"name": "Assumption 3, k of random masks", "value": found.random},
            {"name": "Assumption 3, k of the layers' masks", "value": found.groups},
        ]
    return rows


def _kernels(setup: "Training") -> "list[Tensor] | None":
    """Return the first kernels, in colour for colour images, else as means over the inputs."""
    from privpart.training.diagnostics import first_kernels

    try:
        found = list(first_kernels(setup.model.module))[:32]
        return [kernel if len(kernel) == 3 else kernel.mean(dim=0) for kernel in found]
    except ConfigError:
        return None


def _features(setup: "Training", image: "Tensor", channels: int) -> "Features":
    """Return, per weight layer, the images that maximise its first channels."""
    import torch
    from torch import nn

    from privpart.training.diagnostics import maximal_activation

    # one grey start for all: images from different starts differ by chance
    start = torch.full_like(image, 0.5)
    start += 0.01 * torch.randn(start.shape, generator=torch.Generator().manual_seed(0))
    found: dict[str, list[torch.Tensor]] = {}
    for name, layer in setup.model.module.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            found[name] = [
                maximal_activation(setup.model.module, name, c, start)
                for c in range(min(channels, layer.weight.shape[0]))
            ]
    return found
