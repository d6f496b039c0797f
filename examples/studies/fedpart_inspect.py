"""FedPart's diagnostics of a run from a plan file: step sizes, gradient masks, features, kernels.

FedPart (Wang et al. 2024) draws how far a client's steps jump after each averaging (Fig. 1),
estimates k of its Assumption 3, and compares the images that maximise the activations of channels
(Table 8). With a second run from the same start values, this prints the similarity (SSIM) of both
runs' features by layer, with the untrained network as control. It reads test images and clients'
data and imports the code that the plan names; no guarantee of the run covers what it shows.

Run: python examples/studies/fedpart_inspect.py RUN PICTURES [--against OTHER]
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from accounting import ConfigError, checks
from attacks import ssim
from privpart.cli.pages import drawing
from privpart.client import Loss, batch_loss, client_update
from privpart.data.batches import Batch, count_rows, take
from privpart.engines.methods import client_generator, fetched
from privpart.messages import client_id
from privpart.model import PartialModel
from privpart.training.export import released_parameters
from privpart.training.metric import Accuracy
from privpart.training.train import released_setup
from privpart.training.training import Training, first_batch

Features = dict[str, list[Tensor]]  # layer -> one image per channel
Steps = dict[str, list[list[float]]]  # way of training -> step sizes of each round
EXAMPLES, MASKS = 64, 40
NOT_CLIPPED = 1e30
SAME = ("name", "factory", "sizes", "weights", "keep", "seed")
"""What two runs have in common if their channels correspond."""


def step_sizes(
    model: PartialModel,
    start: Tensor,
    examples: Batch,
    **training: Any,
) -> tuple[Tensor, list[float]]:
    """Return a client's update and the length ||dw|| of each of its steps (FedPart, Fig. 1).

    The update is not clipped.

    Args:
        model: model of the client.
        start: trainable parameters at the start of the round, shape (d,).
        examples: the client's, see ``client_update``.
        training: other arguments of ``client_update``.
    """
    sizes: list[float] = []
    before = start.clone()

    def measure() -> None:
        sizes.append(float((model.flat - before).norm()))
        before.copy_(model.flat)

    training |= {"clip_norm": NOT_CLIPPED, "after_step": measure}
    return client_update(model, start, examples, **training), sizes


def jump_after_averaging(rounds: Sequence[Sequence[float]]) -> float:
    """Return the mean ratio of a round's first step size to the previous round's last.

    Args:
        rounds: step sizes of one client in each of two or more rounds, at least one per round.
    """
    ratios = [new[0] / old[-1] for old, new in pairwise(rounds) if old and new]
    if not ratios:
        raise ConfigError("rounds: must be two or more, with at least one step each.")
    return fmean(ratios)


@dataclass(frozen=True, slots=True)
class MaskRatio:
    """Ratio k of FedPart's Assumption 3: how much the deviations of masked gradients differ.

    Attributes:
        random: largest ratio between random masks of 1/M of the parameters (FedPart, Table 13).
        groups: largest ratio between the masks that FedPart uses, its layer groups.
        by_group: mean deviation of each group, E ||S (g - E g)||.
    """

    random: float
    groups: float
    by_group: tuple[float, ...]


def mask_ratio(
    model: PartialModel,
    examples: Batch,
    *,
    masks: int,
    generator: torch.Generator,
    loss: str | Loss = "cross_entropy",
) -> MaskRatio:
    """Estimate k of FedPart's Assumption 3 from per-example gradients, shape (n, d) in memory.

    Args:
        model: model with two or more groups.
        examples: two or more, see ``client_update``.
        masks: number of random masks, >= 2.
        generator: random generator of the masks.
        loss: see ``batch_loss``.
    """
    groups = len(model.group_sizes)
    count = count_rows(examples)
    if groups < 2 or count < 2 or checks.count("masks", masks) < 2:
        raise ConfigError("mask_ratio: needs at least two groups, examples and masks.")
    model.train_only()
    deviation = torch.empty(count, model.dim)
    for number, row in enumerate(deviation):
        example = take(examples, torch.tensor([number]))
        model.gradient.zero_()
        batch_loss(model.module, example, loss).backward()  # type: ignore[no-untyped-call]
        row.copy_(model.gradient)
    model.gradient.zero_()
    # squares are summed per mask below
    deviation.sub_(deviation.mean(dim=0)).square_()

    def length(columns: Tensor | slice) -> float:
        return float(deviation[:, columns].sum(dim=1).sqrt().mean())

    size = max(1, model.dim // groups)
    random = [length(torch.randperm(model.dim, generator=generator)[:size]) for _ in range(masks)]
    by_group = tuple(length(model.spans([group])[0]) for group in range(groups))
    return MaskRatio(max(random) / min(random), max(by_group) / min(by_group), by_group)


def maximal_activation(
    module: nn.Module, layer: str, channel: int, start: Tensor, *, steps: int = 100
) -> Tensor:
    """Return the image that maximises the activation of one channel (Erhan et al. 2009).

    Args:
        module: network; it is left unchanged.
        layer: name of one of its layers.
        channel: channel of the layer's output; its mean is maximised.
        start: start image, shape (C, H, W), in [0, 1]. To compare two networks, use the same image
            for both: images from different starts differ by chance.
        steps: number of Adam steps, >= 1.

    Returns:
        Shape (C, H, W), in [0, 1].
    """
    layers = dict(module.named_modules())
    if layer not in layers:
        raise ConfigError(f"layer={layer!r}: must be one of {', '.join(filter(None, layers))}.")
    outputs: list[Tensor] = []
    handle = layers[layer].register_forward_hook(lambda _m, _x, output: outputs.append(output))
    image = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([image], lr=0.05)
    try:
        for _ in range(checks.count("steps", steps)):
            outputs.clear()
            module(image[None])
            if not 0 <= channel < outputs[0].shape[1]:
                raise ConfigError(f"channel={channel}: {layer} has {outputs[0].shape[1]} channels.")
            (image.grad,) = torch.autograd.grad(-outputs[0][0, channel].mean(), image)
            optimizer.step()
            # an image outside of the range would compare saturation, not features
            image.data.clamp_(0, 1)
    finally:
        handle.remove()
    return image.detach()


def first_kernels(module: nn.Module) -> Tensor:
    """Return the first convolution's kernels, each scaled to [0, 1], shape (filters, C, k, k)."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            kernels = layer.weight.detach()
            low = kernels.amin(dim=(1, 2, 3), keepdim=True)
            span = kernels.amax(dim=(1, 2, 3), keepdim=True) - low
            return (kernels - low) / span.clamp_min(1e-12)
    raise ConfigError("kernels: the network has no convolution.")


def opened(run: Path) -> tuple[Training, Tensor]:
    """Return a run's training and its newest parameters, without changing the run."""
    parameters, facts = released_parameters(run)
    if "plan_file" not in facts and "plan_tables" not in facts:
        raise ConfigError(f"{run}: was not started from a plan file, so its network is unknown.")

    def tell(plan) -> None:
        print(
            *(f"imports {reference}" for reference in plan.references().values()), file=sys.stderr
        )

    training = released_setup(run, tell=tell)
    return training, training.whole(parameters)


def images_of(training: Training, run: Path) -> tuple[Tensor, Tensor]:
    """Return test images and labels; the first client's examples where the metric has none."""
    if isinstance(training.metric, Accuracy):
        batch = training.test
    else:
        batch, _ = first_batch(training.clients, training.engine.local_of(0))
    x, y = batch if isinstance(batch, tuple | list) and len(batch) == 2 else (None, None)
    if isinstance(x, Tensor) and isinstance(y, Tensor) and x.is_floating_point() and x.dim() == 4:
        return x, y
    raise ConfigError(f"{run}: needs pairs of images, (n, channels, height, width), and labels.")


def steps_of(training: Training, parameters: Tensor, rounds: int) -> Steps:
    """Return the first client's step sizes when all groups train, and when they take turns."""
    groups = len(training.model.group_sizes)
    cohort = [client_id(client) for client in training.clients.ids[:5]]
    turns: dict[str, list[tuple[int, ...] | None]] = {"full": [None] * rounds}
    if groups > 1:
        turns["partial"] = [(r // 2 % groups,) for r in range(rounds)]
    steps: Steps = {name: [] for name in turns}
    for name, actives in turns.items():
        current = parameters.clone()
        for number, active in enumerate(actives):
            updates = []
            for client in cohort:
                generator = client_generator(training.engine.data_seed, number, client)
                update, sizes = step_sizes(
                    training.model,
                    current,
                    fetched(training.clients, client, generator),
                    local=training.engine.local_of(number),
                    generator=generator,
                    active=active,
                )
                updates.append(update)
                if client == cohort[0]:
                    steps[name].append(sizes)
            mean = sum(updates[1:], updates[0]) / len(updates)
            begin = 0
            for span in training.model.spans(active):
                current[span] += mean[begin : begin + span.stop - span.start]
                begin += span.stop - span.start
    training.model.load(parameters)
    return steps


def figures(training: Training, images: tuple[Tensor, Tensor], steps: Steps) -> dict[str, float]:
    """Return the jump after averaging by way of training, and k of Assumption 3."""
    # pairs of rounds that train the same group: steps of different groups are not comparable
    rows = {
        f"first step / last step before, {name}": fmean(
            jump_after_averaging(rounds[r : r + 2]) for r in range(0, len(rounds) - 1, 2)
        )
        for name, rounds in steps.items()
    }
    if len(training.model.group_sizes) > 1:
        ratio = mask_ratio(
            training.model,
            (images[0][:EXAMPLES], images[1][:EXAMPLES]),
            masks=MASKS,
            loss=training.engine.local_of(0).loss,
            generator=torch.Generator().manual_seed((training.plan.model.seed or 0) % 2**63),
        )
        rows["Assumption 3, k of random masks"] = ratio.random
        rows["Assumption 3, k of the layers' masks"] = ratio.groups
    return rows


def features_of(training: Training, image: Tensor, channels: int) -> Features:
    """Return, per weight layer, the images that maximise its first channels."""
    # one grey start for all: images from different starts differ by chance
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(0))
    start = torch.full_like(image, 0.5) + 0.01 * noise
    module = training.model.module
    return {
        name: [
            maximal_activation(module, name, channel, start)
            for channel in range(min(channels, layer.weight.shape[0]))
        ]
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    }


def kernels_of(training: Training) -> dict[str, list[Tensor]]:
    """Return the first kernels in rows of eight; of many inputs, their means."""
    try:
        kernels = list(first_kernels(training.model.module))[:32]
    except ConfigError:
        return {}
    shown = [kernel if len(kernel) == 3 else kernel.mean(0, keepdim=True) for kernel in kernels]
    return {f"from {i}": shown[i : i + 8] for i in range(0, len(shown), 8)}


def draw_steps(steps: Steps, path: Path) -> None:
    """Draw one client's step sizes, a line per way of training and a tick at each averaging."""
    figure, axes = drawing.panel(6.4, 3.4)
    styles = drawing.Styles()
    for name, rounds in steps.items():
        sizes = [size for of_round in rounds for size in of_round]
        axes.plot(range(len(sizes)), sizes, **styles.of(name) | {"marker": ".", "linewidth": 1})
    starts = [0]
    for of_round in next(iter(steps.values())):
        starts.append(starts[-1] + len(of_round))
    axes.set_xticks(starts[:-1], [f"round {r}" for r in range(len(starts) - 1)], fontsize=7)
    axes.set_xlabel("local steps of one client")
    axes.set_ylabel("length of the step")
    drawing.legend(axes)
    drawing.save(figure, path)


def draw_rows(rows: Mapping[str, Sequence[Tensor]], path: Path) -> None:
    """Draw a row of images per name, each image of shape (C, H, W) in [0, 1]."""
    if not rows:
        return
    columns = max(map(len, rows.values()))
    figure = Figure(figsize=(columns + 1.5, len(rows)), layout="constrained")
    cells = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, images) in zip(cells, rows.items(), strict=True):
        line[0].text(-0.1, 0.5, name, transform=line[0].transAxes, ha="right", va="center")
        for cell in line:
            cell.axis("off")
        for cell, image in zip(line, images, strict=False):
            cell.imshow(image.movedim(0, 2).numpy(), cmap="gray", vmin=0, vmax=1)
    drawing.save(figure, path)


def main(words: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("pictures", type=Path, help="folder; created if missing")
    parser.add_argument("--against", type=Path, help="another run from the same start values")
    parser.add_argument("--rounds", type=int, default=6, help="of one client's step sizes")
    parser.add_argument("--channels", type=int, default=4, help="per layer")
    options = parser.parse_args(words)
    training, parameters = opened(options.run)
    images = images_of(training, options.run)
    start = training.model.flat.clone()
    training.model.load(parameters)
    steps = steps_of(training, parameters, options.rounds)
    rows = figures(training, images, steps)
    features = {"run": features_of(training, images[0][0], options.channels)}
    kernels = {"kernels": kernels_of(training)}
    if options.against is not None:
        other, weights = opened(options.against)
        ours, theirs = ([getattr(t.plan.model, key) for key in SAME] for t in (training, other))
        shapes = {x.shape[1:] for x, _ in (images, images_of(other, options.against))}
        if ours != theirs or len(shapes) > 1:
            raise ConfigError(f"{options.against}: its channels do not correspond to the run's.")
        other.model.load(weights)
        features["against"] = features_of(other, images[0][0], options.channels)
        kernels["kernels-against"] = kernels_of(other)
        training.model.load(start)
        features["untrained"] = features_of(training, images[0][0], options.channels)
        for layer, shown in features["run"].items():
            for name in ("against", "untrained"):
                scores = ssim(torch.stack(shown), torch.stack(features[name][layer]))
                rows[f"SSIM, {layer}, run and {name}"] = float(scores.mean())
    options.pictures.mkdir(parents=True, exist_ok=True)
    draw_steps(steps, options.pictures / "steps.png")
    by_layer = {
        f"{layer}, {name}": of_run[layer]
        for layer in features["run"]
        for name, of_run in features.items()
    }
    draw_rows(by_layer, options.pictures / "features.png")
    for name, shown in kernels.items():
        draw_rows(shown, options.pictures / f"{name}.png")
    for name, value in rows.items():
        print(f"{name:<44} {value:.4g}")
    return rows


if __name__ == "__main__":
    main()
