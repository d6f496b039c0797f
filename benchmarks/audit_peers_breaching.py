"""Breaching: run jobs of the audit's peers in its own environment.

Run by ``audit_peers.py``: ``python audit_peers_breaching.py FOLDER``. Each FOLDER/*.npz is a job
(network, seed, gradients, labels, mode, budget); its answer is written beside it as *.out.npz with
the images, the iterations and the processor seconds, or an error.
"""

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
from audit_peers_cases import CLASSES, NETWORKS, SIZE, Network
from omegaconf import DictConfig, OmegaConf, open_dict

SETUP = {"dtype": torch.float32, "device": torch.device("cpu")}
_TRIAL = 4  # iterations that are timed before their number is fixed


def main(folder: Path) -> None:
    """Answer every job of the folder that has no answer."""
    torch.set_num_threads(1)
    for path in sorted(folder.glob("*.job.npz")):
        answer = path.with_name(path.name.replace(".job.", ".out."))
        if not answer.exists():
            try:
                found = attack(dict(np.load(path)))
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"[:300]}
            np.savez(answer, **found)


def attack(job: dict[str, Any]) -> dict[str, Any]:
    """Return what one of its attacks finds within the budget of processor seconds."""
    name, mode, budget = str(job["network"]), str(job["mode"]), float(job["budget"])
    network = NETWORKS[name]
    model = network.seeded(int(job["seed"]))
    gradients = [torch.from_numpy(job[f"g{i}"]) for i, _ in enumerate(model.parameters())]
    labels = torch.from_numpy(job["labels"])
    torch.manual_seed(int(job["seed"]))  # noqa: TID251  breaching draws from the global state
    config = breaching.get_attack_config(mode)
    most = int(config.optim.max_iterations)
    if mode == "deepleakage":
        start = time.process_time()
        signal.signal(signal.SIGPROF, _stop)
        signal.setitimer(signal.ITIMER_PROF, budget)
        iterations = most
    else:
        for _ in range(2):  # the first one compiles
            start = time.process_time()
            _run(config, model, gradients, labels, network, _TRIAL)
        each = (time.process_time() - start) / _TRIAL
        iterations = max(1, min(most, round(budget / each)))
        start = time.process_time()
    images = _run(config, model, gradients, labels, network, iterations)
    signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - start
    found = (images * network.std + network.mean).numpy()
    return {"x": found, "iterations": iterations, "seconds": seconds}


def _stop(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt  # which breaching takes as "return the best so far"


def _run(
    config: DictConfig,
    model: torch.nn.Module,
    gradients: list[torch.Tensor],
    labels: torch.Tensor,
    network: Network,
    iterations: int,
) -> torch.Tensor:
    joint = config.attack_type == "joint-optimization"
    with open_dict(config):
        config.optim.max_iterations = iterations
        config.optim.callback = iterations
    metadata = OmegaConf.create(
        {
            "shape": [3, SIZE, SIZE],
            "mean": [network.mean] * 3,
            "std": [network.std] * 3,
            "modality": "vision",
            "task": "classification",
            "classes": CLASSES,
        }
    )
    payload = {
        "parameters": list(model.parameters()),
        "buffers": list(model.buffers()),
        "metadata": metadata,
    }
    shared = {
        "gradients": gradients,
        "buffers": None,
        "metadata": {
            "num_data_points": len(labels),
            "labels": None if joint else labels,
            "local_hyperparams": None,
        },
    }
    loss = torch.nn.CrossEntropyLoss()
    attacker = breaching.attacks.prepare_attack(model, loss, config, SETUP)
    found, _ = attacker.reconstruct([payload], [shared], {})
    return found["data"].detach()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
