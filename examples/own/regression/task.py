"""Delivery times from a CSV file with a column of drivers, learnt by a loss of one's own.

Some deliveries take far longer than others alike, so the network predicts the median, not the mean.
"""

from pathlib import Path

import pandas as pd
import torch

from privpart.data import from_frame

HERE = Path(__file__).parent
INPUTS = ["kilometres", "stops", "rain", "weekend"]


def clients():
    """Return the drivers."""
    return from_frame(pd.read_csv(HERE / "deliveries.csv"), user="driver", x=INPUTS, y="minutes")


def pinball(module, batch, quantile=0.5):
    """Return the mean loss of a batch; this quantile of the minutes has the least."""
    x, y = batch
    late = y - module(x).squeeze(1)
    return torch.maximum(quantile * late, (quantile - 1) * late).mean()


def errors(module):
    """Return by how many minutes the network misses deliveries that no driver of ours made."""
    public = pd.read_csv(HERE / "public.csv")
    predicted = module(torch.tensor(public[INPUTS].to_numpy("float32"))).squeeze(1)
    missed = (predicted - torch.tensor(public["minutes"].to_numpy("float32"))).abs()
    rain = torch.tensor(public["rain"].to_numpy() > 0)
    return {
        "minutes": missed.mean(),
        "minutes/rain": missed[rain].mean(),
        "minutes/dry": missed[~rain].mean(),
    }
