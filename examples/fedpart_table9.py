"""Repeat FedPart's Table 9: does sending one layer protect, or did the attack fail?

FedPart (Wang et al. 2024) reports the PSNR of images reconstructed from ResNet-8: 17.07 dB from
the full update, 12.53 from layer #1, 13.84 from layer #10, and concludes that parts protect. Its
target is the gradient of a softened label, which no client sends. Here the gradient is a client's
own, each row has baselines beside it and says what follows. CIFAR-100 and trained weights do not
come with this package: crops of two colour photographs and untrained weights take their place.

Run: python examples/fedpart_table9.py
     python examples/fedpart_table9.py --long   (the full width, more images and steps: an hour)
"""

import sys
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.nn.functional import avg_pool2d, cross_entropy, one_hot, softmax

from attacks import leakage, observe, suite
from attacks.networks import drawn
from privpart.cli.pages.plots import draw_reconstructions
from privpart.models import MODELS, resnet8

PUBLISHED = {"full": (17.07, 25.57), "#1": (12.53, 15.02), "#10": (13.84, 16.88)}
SIDE = 32


def crops() -> Tensor:
    """Return (N, 3, 32, 32) in [0, 1]: all crops of the two photographs at a quarter size."""
    found = []
    for photograph in load_sample_images().images:
        small = avg_pool2d(torch.tensor(photograph).permute(2, 0, 1)[None] / 255.0, 4)
        tiles = small.unfold(2, SIDE, SIDE).unfold(3, SIDE, SIDE)
        found.append(tiles[0].permute(1, 2, 0, 3, 4).flatten(0, 1))
    return torch.cat(found).clamp(0, 1)


def softened(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the published attack's loss: its target is softmax(one_hot), 0.027 at the label."""
    target = softmax(one_hot(labels, logits.shape[1]).to(logits.dtype), 1)
    return cross_entropy(logits, target)


def main() -> None:
    torch.set_num_threads(1)
    long = "--long" in sys.argv[1:]
    images, labels = crops(), torch.arange(len(crops())) % 100
    audited = [9, 11, 13, 24] if long else [9]
    rest = [i for i in range(len(images)) if i not in audited]
    build = partial(resnet8, classes=100, width=64 if long else 8, norm="batch")
    model = drawn(build, torch.Generator().manual_seed(0)).eval()
    first, *_, last = MODELS["resnet8"].groups
    x, y = images[audited], labels[audited]

    true, soft = (observe(model, x[:1], y[:1], loss=f).update for f in (cross_entropy, softened))
    a, b = (torch.cat([value.flatten() for value in u.values()]) for u in (true, soft))
    print("Softened target against a client's own gradient:")
    share = float(b.norm() / a.norm())
    cosine = float(a @ b / a.norm() / b.norm())
    print(f"  its norm is {share:.1%} of the true one, their cosine {cosine:.2f}")

    budget = (
        {"max_evaluations": 300, "steps": 2000} if long else {"max_evaluations": 25, "steps": 40}
    )
    report = leakage(
        *(model, x, y),
        views={"full": ["*"], "#1": first, "#10": last},
        attacks=suite(restarts=1, newton_steps=0, tv=1e-2, **budget),
        dataset_mean=images[rest].mean(0),
        decoys=(images[rest], labels[rest]),
        schedule=["full"] * 5 + ["#1"] * 2 + ["#10"] * 2,
    )
    print(f"\nPSNR in dB, {len(x)} image(s); FedPart's figures are for other images and weights")
    for name, scores in report.baselines.items():
        print(f"  no attack: {name:<14} mean {mean(scores):5.1f}   max {max(scores):5.1f}")
    for row in report.rows:
        theirs = PUBLISHED[row.view]
        print(
            f"  {row.view:<6} ({row.share:6.2%} sent)    mean {mean(row.psnr):5.1f}   "
            f"max {max(row.psnr):5.1f}   FedPart {theirs[0]:.2f} / {theirs[1]:.2f}   "
            f"residual {row.to_dict()['match_median']:.0e}   rank {row.ranks}   {row.verdict}"
        )
        for layer, error in row.feature_error.items():
            print(f"         the input of {layer} is found exactly (relative error {error:.0e})")
    worst = report.worst_round
    print(f"\nWorst round of FedPart's schedule: {worst.view}, {worst.verdict}")
    print("Rank 1: the update tells which of the candidates it came from, whatever the PSNR.")
    if long:
        draw_reconstructions([report], Path("fedpart_table9.png"))


if __name__ == "__main__":
    main()
