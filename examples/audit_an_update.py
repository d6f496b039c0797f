"""Audit one client's gradient, whole and in parts, before any noise.

Run: python examples/audit_an_update.py
"""

import torch

from attacks import leakage, suite
from attacks.networks import smooth_lenet
from privpart.data.tasks import digits


def main() -> None:
    torch.set_num_threads(1)
    task = digits()
    audit = leakage(
        smooth_lenet(torch.Generator().manual_seed(0)),
        task.test_x[:3],
        task.test_y[:3],
        views={
            "the whole update": ["*"],
            "without the first dense layer": ["conv*", "dense2.*"],
            "the first dense layer alone": ["dense1.*"],
            "the last layer alone": ["dense2.*"],
        },
        dataset_mean=task.train_x.mean(dim=0),
        attacks=suite(max_evaluations=300, newton_steps=0, steps=200),
    )
    for name, scores in audit.baselines.items():
        print(f"{'no attack: ' + name:<31} {max(scores):6.1f} dB at most")
    for row in audit.rows:
        print(f"{row.view:<31} {max(row.psnr):6.1f} dB at most   {row.verdict}")


if __name__ == "__main__":
    main()
