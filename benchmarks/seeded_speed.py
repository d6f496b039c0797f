"""Seeded parameters' speed: the frozen weights of FedPT's ResNet-18 compared with torch.randn.

Run: ``python benchmarks/seeded_speed.py``; writes benchmarks/results/seeded.json.

The task: 10,985,472 Gaussian float32 parameters in 16 tensors, the 3x3 convolutions that FedPT's
Table 10 freezes. ``torch.randn`` gives different bits on different processors, so it could not
generate the frozen part; it shows what a random tensor costs at least.
"""

import frame

import hashlib

import numpy as np
import torch

from privpart import He, PartialModel
from privpart.model import tensors_fingerprint
from privpart.models import MODELS
from privpart.start_values import GENERATOR, seeded_tensor


def jobs(frozen: dict[str, torch.Tensor]) -> dict[str, frame.Job]:
    shapes = {name: tensor.shape for name, tensor in frozen.items()}
    outs = [torch.empty(shape) for shape in shapes.values()]
    generator = torch.Generator().manual_seed(0)
    table = np.linspace(-4, 4, 1 << 16).astype(np.float32)

    def shake(name: str, shape: torch.Size) -> torch.Tensor:
        """Return a tensor of generator version 1: SHAKE-128 words and one gather."""
        words = np.frombuffer(hashlib.shake_128(name.encode()).digest(2 * shape.numel()), "<u2")
        return torch.from_numpy(table[words] * np.float32(0.1)).reshape(shape)

    return {
        f"seeded_tensor (generator {GENERATOR})": lambda: [
            seeded_tensor(1, name, shape, He()) for name, shape in shapes.items()
        ],
        "torch.randn": lambda: [torch.randn(s, generator=generator) for s in shapes.values()],
        "torch.randn into existing memory": lambda: [
            torch.randn(out.shape, generator=generator, out=out) for out in outs
        ],
        "generator 1 (SHAKE-128)": lambda: [shake(*one) for one in shapes.items()],
        "fingerprint": lambda: tensors_fingerprint(frozen),
    }


def main() -> None:
    given = frame.options(__doc__, "seeded.json", quick={"turns": 1}, turns=15)
    torch.set_num_threads(1)
    result = frame.Result(given.result, "numpy", "torch")
    freeze_all = MODELS["resnet18_gn"].ladder["freeze-0-1-2-3"]
    model = PartialModel(MODELS["resnet18_gn"].build, train=freeze_all, seed=1)
    parameters = dict(model.module.named_parameters())
    frozen = {name: parameters[name] for name in model.frozen}
    count, rows = sum(tensor.numel() for tensor in frozen.values()), {}
    for name, times in frame.in_turns(jobs(frozen), given.turns).items():
        row = frame.spread((one.wall for one in times), "{}_seconds")
        rows[name] = row | {"nanoseconds_per_number": 1e9 * row["least_seconds"] / count}
        frame.show(name, rows[name])
    result.write(numbers=count, repeats=given.turns, rows=rows)


if __name__ == "__main__":
    main()
