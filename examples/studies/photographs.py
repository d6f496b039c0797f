"""README's first picture: two photographs, and what an attacker reads out of a client's update.

Run: python examples/studies/photographs.py; writes docs/photographs.png

A client trains on one photograph, 32 x 32 pixels, for one step. The attacker knows the network and
the label. "Under the noise" is the update as the world may see it: clipped, with the Gaussian noise
of one release at epsilon 8, delta 1e-5, and every other client of the round known to the attacker.
Of the attacks tried there, the picture shows the one nearest to the truth, which no attacker knows.

The photographs are scikit-learn's samples: china.jpg by danielbuechele and flower.jpg by vultilion,
both CC BY 2.0, https://www.flickr.com/photos/danielbuechele/6061409035 and
https://www.flickr.com/photos/vultilion/6056698931; cropped and made smaller.
"""

from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_sample_image
from torch import Tensor
from torch.nn.functional import interpolate

from accounting import Independent, Participation, calibrate
from attacks import cosine_tv, dlg, observe, psnr
from attacks.networks import smooth_lenet
from privpart.cli.pages import drawing

DOCS = Path(__file__).parents[2] / "docs"
CROPS = {"china.jpg": (20, 24, 380), "flower.jpg": (40, 110, 360)}
"""File -> top, left and side of the square that is cut out, in pixels."""
EPSILON, DELTA = 8.0, 1e-5
FALLING = (0.1, 0.01, 0.001, 0.0)
VIEWS = {
    "read out of its\nwhole update": None,
    "of its first layer,\n{:.1f} % of it": ("conv1.*",),
    "of its last layer,\n{:.1f} % of it": ("dense2.*",),
}
NOISED = f"of the whole update\nwith noise, epsilon {EPSILON:g}"
search = partial(dlg, restarts=1, newton_steps=0)
UNDER_NOISE = (
    partial(search, max_evaluations=400, tv=(10.0, 3.0, 1.0)),
    partial(search, max_evaluations=400, tv=FALLING),
    partial(cosine_tv, restarts=2, steps=300, tv=(2.0, 20.0)),
)


def photographs() -> Tensor:
    """Return the two photographs, (2, 3, 32, 32) in [0, 1]."""
    squares = []
    for name, (top, left, side) in CROPS.items():
        pixels = torch.from_numpy(load_sample_image(name).copy()).double().permute(2, 0, 1) / 255
        square = pixels[None, :, top : top + side, left : left + side]
        squares.append(interpolate(square, (32, 32), mode="area"))
    return torch.cat(squares)


def reconstructions(x: Tensor, evaluations: int) -> dict[str, Tensor]:
    """Return what each view gives away of each photograph, images like ``x``."""
    model = smooth_lenet(torch.Generator().manual_seed(0), channels=3, size=32)
    size = sum(p.numel() for p in model.parameters())
    once = Participation(1, max_participations=1)
    noise = calibrate(Independent(1), once, target_epsilon=EPSILON, delta=DELTA)
    shown = {}
    for view, visible in VIEWS.items():
        images, share = [], 0.0
        for i, image in enumerate(x[:, None]):
            seen = observe(model, image, torch.tensor([i]), visible=visible)
            share = 100 * sum(part.numel() for part in seen.update.values()) / size
            images.append(search(model, seen, max_evaluations=evaluations, tv=FALLING).x)
        shown[view.format(share)] = torch.cat(images)
    images = []
    for i, image in enumerate(x[:, None]):
        draws = torch.Generator().manual_seed(i)
        seen = observe(
            model, image, torch.tensor([i]), clip=1.0, noise_multiplier=noise, generator=draws
        )
        tried = [attack(model, seen).x for attack in UNDER_NOISE]
        images.append(max(tried, key=lambda guess: float(psnr(guess, image))))
    return shown | {NOISED: torch.cat(images)}


def main(docs: Path = DOCS, evaluations: int = 1000) -> None:
    """Draw a row per photograph, and print the scores."""
    torch.set_num_threads(1)
    x = photographs()
    shown = {"a client's\nphotograph": x} | reconstructions(x, evaluations)
    figure, axes = drawing.panels(len(shown), 1.72, 2.15, rows=2)
    grey = psnr(torch.full_like(x, 0.5), x)
    for column, (view, images) in enumerate(shown.items()):
        scores = grey if images is x else psnr(images, x)
        for row, (image, score) in enumerate(zip(images, scores.tolist(), strict=True)):
            panel = axes[row * len(shown) + column]
            panel.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
            panel.set_xticks([])
            panel.set_yticks([])
            panel.grid(visible=False)
            panel.set_xlabel(f"{'a grey image: ' * (images is x)}{score:.1f} dB")
            print(f"{' '.join(view.split()):<45} {score:6.1f} dB")
        axes[column].set_title(view)
    drawing.save(figure, docs / "photographs.png")


if __name__ == "__main__":
    main()
