"""Breaching: run one job of the audit's peers in its own environment.

Run by ``audit_peers.py``: ``python audit_peers_breaching.py JOB.npz ANSWER.npz``. A job has the
network, seed, gradients, labels, mode and budget; the answer has the images and the processor
seconds, or an error.
"""
# ruff: noqa: E402

import importlib.util
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")
import numpy as np
import torch

# A torchvision built for CUDA does not load its operators beside a CPU build of torch, and its
# import stops where it describes them. No attack uses them.
_SPEC = importlib.util.find_spec("torchvision")
try:
    torch.ops.load_library(str(next(Path(_SPEC.origin).parent.glob("_C*.so"))))
except OSError:
    _VISION = torch.library.Library("torchvision", "DEF")
    for _operator in ("nms", "qnms"):
        _VISION.define(f"{_operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
import breaching
from audit_peers_cases import CLASSES, NETWORKS, SIZE
from omegaconf import OmegaConf, open_dict

_TRIAL = 4  # iterations that are timed before their number is fixed


def attack(job: dict[str, Any]) -> dict[str, Any]:
    """Return what one of its attacks finds within the budget of processor seconds."""
    mode, budget = str(job["mode"]), float(job["budget"])
    network = NETWORKS[str(job["network"])]
    model = network.seeded(int(job["seed"]))
    labels = torch.from_numpy(job["labels"])
    torch.manual_seed(int(job["seed"]))  # noqa: TID251  breaching draws from the global state
    config = breaching.get_attack_config(mode)
    metadata = {
        "shape": [3, SIZE, SIZE],
        "mean": [network.mean] * 3,
        "std": [network.std] * 3,
        "modality": "vision",
        "task": "classification",
        "classes": CLASSES,
    }
    payload = {
        "parameters": list(model.parameters()),
        "buffers": list(model.buffers()),
        "metadata": OmegaConf.create(metadata),
    }
    shared = {
        "gradients": [torch.from_numpy(job[f"g{i}"]) for i, _ in enumerate(model.parameters())],
        "buffers": None,
        "metadata": {
            "num_data_points": len(labels),
            "labels": None if config.attack_type == "joint-optimization" else labels,
            "local_hyperparams": None,
        },
    }
    setup = {"dtype": torch.float32, "device": torch.device("cpu")}

    def run(iterations: int) -> torch.Tensor:
        with open_dict(config):
            config.optim.max_iterations = config.optim.callback = iterations
        loss = torch.nn.CrossEntropyLoss()
        attacker = breaching.attacks.prepare_attack(model, loss, config, setup)
        return attacker.reconstruct([payload], [shared], {})[0]["data"].detach()

    iterations = int(config.optim.max_iterations)
    if mode != "deepleakage":
        for _ in range(2):  # the first one compiles
            start = time.process_time()
            run(_TRIAL)
        each = (time.process_time() - start) / _TRIAL
        iterations = max(1, min(iterations, round(budget / each)))
    start = time.process_time()
    if mode == "deepleakage":
        signal.signal(signal.SIGPROF, _stop)
        signal.setitimer(signal.ITIMER_PROF, budget)
    images = run(iterations)
    signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - start
    return {"x": (images * network.std + network.mean).numpy(), "seconds": seconds}


def _stop(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt  # which breaching takes as "return the best so far"


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        answer = attack(dict(np.load(sys.argv[1])))
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:300]}
    np.savez(sys.argv[2], **answer)
