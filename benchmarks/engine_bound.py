"""Engine bound: how much of plain PyTorch's time is products, which any engine has to compute.

Run: ``python benchmarks/engine_bound.py``; writes benchmarks/results/engine_bound.json. Of each
network, one client of plain PyTorch is computed on one thread, in the faster layout of images.

share    of convolutions, matrix products and recurrent layers in the client's processor time; one
         over it is how many times as fast an engine could be that computes the
         same products by the same libraries, and everything else in no time
of_peak  the client's products per processor second, over the highest rate of this thread in a
         product of two matrices of 1024 x 1024; one over it bounds every engine that computes the
         same products. Recurrent layers are not counted.
"""

import frame

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from engine_cases import CASES, DEFAULT, SMALLEST, Plain
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

_PRODUCTS = ("conv", "addmm", "aten.mm", "bmm", "lstm", "rnn", "mkldnn", "attention")


class Products(TorchDispatchMode):
    """Adds up the processor seconds that this thread spends inside torch's products.

    The clock is read around the kernel alone, so that the cost of watching is in no sum.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        began = time.thread_time()
        result = func(*args, **(kwargs or {}))
        if any(part in str(func) for part in _PRODUCTS):
            self.seconds += time.thread_time() - began
        return result


def peak(turns: int) -> float:
    """Return the most operations per second of a float32 product, one multiply-add being two."""
    a, b = torch.rand(2, 1024, 1024)
    return 2 * 1024**3 / min(s.cpu for s in frame.in_turns({"": lambda: a @ b}, turns)[""])


def client(name: str, layout: str, turns: int) -> dict[str, Any]:
    """Return one client's processor seconds, and its products: operations, and share of time."""
    case = CASES[name]
    plain = Plain(case, case.users(), range(1), layout=layout)
    plain.round()
    seconds, shares = [], []
    for _ in range(turns):
        seconds.append(frame.seconds(plain.round).cpu)
        with Products() as seen:
            plain.round()
        shares.append(seen.seconds / seconds[-1])
    with FlopCounterMode(display=False) as counter:
        plain.round()
    return {
        "layout": layout,
        "seconds": min(seconds),
        "operations": float(counter.get_total_flops()),
        "share": statistics.median(shares),
    }


def main() -> None:
    given = frame.options(
        __doc__,
        "engine_bound.json",
        quick={"turns": 1, "cases": SMALLEST},
        turns=3,
        cases=frame.among(CASES, DEFAULT[:6]),
    )
    torch.set_num_threads(1)
    result = frame.Result(given.result, "torch")
    highest = peak(20)
    cases: dict[str, Any] = {}
    for name in given.cases:
        rows = [client(name, layout, given.turns) for layout in CASES[name].layouts]
        row = min(rows, key=lambda one: one["seconds"])
        cases[name] = row | {"of_peak": row["operations"] / row["seconds"] / highest}
        frame.show(name, cases[name])
    result.write(peak_operations_per_second=highest, cases=cases)


if __name__ == "__main__":
    main()
