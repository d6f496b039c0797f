"""Prints the verdicts of sixteen audits as JSON; run by test_processors under several settings."""

import json
import sys

import torch
from sklearn.datasets import load_digits
from subjects import Recurrent, dense, filled, seeded

from attacks import LocalSteps, leakage, observe, suite, text_leakage
from attacks.networks import relu_lenet, smooth_lenet, smooth_mlp
from privpart.models.transformer import LanguageModel

QUICK = suite(restarts=1, max_evaluations=150, newton_steps=0, steps=100)
COUNT = 2


def images():
    data = load_digits()
    x, y = torch.tensor(data.images[:200] / 16).float()[:, None], torch.tensor(data.target[:200])
    mean = x[50:].mean(0)
    nets = {
        "lenet": lambda: smooth_lenet(seeded(0)),
        "mlp": lambda: smooth_mlp(seeded(0)),
        "relu": lambda: relu_lenet(seeded(0)),
        "dense": lambda: dense(bound=0.2),
    }
    steps = LocalSteps(learning_rate=0.1, steps=3)
    adam = LocalSteps(learning_rate=1e-3, optimizer="adam")
    cases = {
        "everything": ("lenet", ["*"], {}),
        "first layer": ("lenet", ["conv1.*"], {}),
        "dense layer": ("mlp", ["dense1.*"], {}),
        "two images": ("dense", ["*"], {"batch": 2}),
        "ReLU": ("relu", ["*"], {}),
        "top-k": ("lenet", ["*"], {"transform": "top-k:0.1"}),
        "signs": ("lenet", ["*"], {"transform": "signs"}),
        "local steps": ("lenet", ["*"], {"local": steps}),
        "Adam": ("lenet", ["*"], {"local": adam}),
        "noise": ("lenet", ["*"], {"clip": 1.0, "noise_multiplier": 0.1}),
        "hidden labels": ("lenet", ["*"], {"reveal_labels": False}),
    }
    found = {}
    for name, (net, view, options) in cases.items():
        size = 2 * COUNT if "batch" in options else COUNT
        report = leakage(
            *(nets[net]().eval(), x[:size], y[:size]),
            views={"v": view},
            dataset_mean=mean,
            attacks=QUICK,
            **options,
        )
        found[name] = [trial.verdict for row in report.rows for trial in row.best]
    sent = observe(nets["lenet"]().eval(), x[1:2], y[1:2]).update
    report = leakage(nets["lenet"]().eval(), x[:1], y[:1], views={"v": ["*"]}, update=sent)
    return found | {"other image": [report.verdict, *report.explanation.causes]}


def texts():
    words = torch.stack([torch.randperm(200, generator=seeded(i))[:8] for i in range(4)])
    decoder = LanguageModel(vocabulary=200, width=96, heads=8, hidden=64, layers=1).eval()
    cases = {
        "attention": (filled(decoder, 0.2), "layers.0.attention.*"),
        "embedding": (filled(decoder, 0.2), "embedding.*"),
        "output": (Recurrent(200), "out.bias"),
        "words": (Recurrent(200), "tokens.*"),
    }
    found = {}
    for name, (net, view) in cases.items():
        report = text_leakage(net, words, views={"v": [view]}, batch=2)
        found[name] = [trial.verdict for row in report.rows for trial in row.best]
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(images() | texts()))
