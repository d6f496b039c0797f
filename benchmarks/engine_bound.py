"""Engine bound: how much of plain PyTorch's time is products, which any engine has to compute.

Run: ``python benchmarks/engine_bound.py``; writes benchmarks/results/engine_bound.json. Of each
network, one client of plain PyTorch is computed on one thread, in the faster layout of images.

share    of convolutions, matrix products and recurrent layers in the time of all of torch's
         operations; one over it is how many times as fast an engine could be that computes the
         same products by the same libraries, and everything else in no time
of_peak  the client's products per processor second, over the highest rate of this thread in a
         product of two matrices of 1024 x 1024; one over it bounds every engine that computes the
         same products. Recurrent layers are not counted.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from engine_cases import CASES, Plain
from machine import machine
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

RESULT = Path(__file__).parent / "results" / "engine_bound.json"
_PRODUCTS = ("conv", "addmm", "aten::mm", "bmm", "lstm", "mkldnn", "attention")
_LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
_CASES = list(CASES)[:6]


def peak(turns: int) -> float:
    """Return the most operations per second of a float32 product, one multiply-add being two."""
    a, b = torch.rand(2, 1024, 1024)
    found = []
    for _ in range(turns + 1):
        began = time.process_time()
        a @ b
        found.append(time.process_time() - began)
    return 2 * 1024**3 / min(found[1:])


def client(name: str, layout: str, turns: int) -> dict[str, Any]:
    """Return one client's processor seconds, and its products: operations, and share of time."""
    case = CASES[name]
    plain = Plain(case, case.users(), range(1), layout=_LAYOUTS[layout])
    plain.round()
    seconds, shares = [], []
    for _ in range(turns):
        began = time.process_time()
        plain.round()
        seconds.append(time.process_time() - began)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            plain.round()
        own = [(event.key, event.self_cpu_time_total) for event in found.key_averages()]
        products = sum(s for key, s in own if any(part in key for part in _PRODUCTS))
        shares.append(products / sum(s for _, s in own))
    with FlopCounterMode(display=False) as counter:
        plain.round()
    return {
        "layout": layout,
        "seconds": min(seconds),
        "operations": float(counter.get_total_flops()),
        "share": statistics.median(shares),
    }


def main() -> None:
    """Write the results and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=_CASES, choices=list(CASES))
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    highest = peak(20)
    cases: dict[str, Any] = {}
    for name in options.cases:
        layouts = list(_LAYOUTS) if CASES[name].convolutional else ["contiguous"]
        found = [client(name, layout, options.turns) for layout in layouts]
        row = min(found, key=lambda one: one["seconds"])
        cases[name] = row | {"of_peak": row["operations"] / row["seconds"] / highest}
        print(name, cases[name], flush=True)
    document = {"machine": machine("torch"), "peak_operations_per_second": highest, "cases": cases}
    options.result.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
