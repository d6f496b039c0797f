"""A character LSTM, as in Opacus's char-lstm example, with DP-FTRL or DP-SGD.

It tells good reviews from bad ones, letter by letter. With ``from opacus import PrivacyEngine`` and
``PrivacyEngine()`` in two lines, this is a program of Opacus's. An ``nn.LSTM`` would be refused
before training; ``FTRLEngine.get_compatible_module(model)`` puts a DPLSTM in its place.

    python char_lstm.py [--dp-sgd] [--epochs 3] [--out FOLDER]

With ``--out`` every step is kept: after a crash, the same line continues. A seed is for
simulations, which are not private.
"""

import argparse
from pathlib import Path

import pandas as pd
import torch
from opacus.layers import DPLSTM
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from privpart import FTRLEngine

TEXTS = Path(__file__).parent.parent / "own" / "bert_lora"
BATCH, DELTA, LETTERS = 32, 1e-4, 64


class CharLSTM(nn.Module):
    """Letters to a label: the mean of an LSTM's outputs."""

    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(128, 16)
        self.lstm = DPLSTM(16, 32, batch_first=True)
        self.label = nn.Linear(32, 2)

    def forward(self, x):
        return self.label(self.lstm(self.letters(x))[0].mean(1))


def reviews(name):
    rows = pd.read_csv(TEXTS / name)
    texts = [text.encode("ascii", "replace")[:LETTERS].ljust(LETTERS) for text in rows["text"]]
    codes = torch.tensor([list(text) for text in texts])
    return TensorDataset(codes, torch.tensor(rows["label"].to_numpy()))


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--dp-sgd", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int)
    given = parser.parse_args(arguments)
    test = reviews("public.csv")

    model = CharLSTM()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data_loader = DataLoader(reviews("reviews.csv"), batch_size=BATCH)

    privacy_engine = FTRLEngine(seed=given.seed)
    model, optimizer, data_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=data_loader,
        target_epsilon=8.0,
        target_delta=DELTA,
        epochs=given.epochs,
        max_grad_norm=1.0,
        poisson_sampling=given.dp_sgd,
        **({"out": given.out, "resume": True} if given.out else {}),
    )
    print(f"epsilon {privacy_engine.get_epsilon(DELTA)} at delta {DELTA:g}, before training")

    begun, checkpoint = 0, given.out and given.out.with_suffix(".pt")
    if checkpoint and checkpoint.exists():
        begun = privacy_engine.load_checkpoint(path=checkpoint, module=model, optimizer=optimizer)[
            "epochs"
        ]
    criterion = nn.CrossEntropyLoss()
    for epoch in range(begun, given.epochs):
        for images, labels in data_loader:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()
        if checkpoint:
            privacy_engine.save_checkpoint(
                path=checkpoint,
                module=model,
                optimizer=optimizer,
                checkpoint_dict={"epochs": epoch + 1},
            )

    model.eval()
    with torch.no_grad():
        right = (model(test.tensors[0]).argmax(1) == test.tensors[1]).float().mean()
    epsilon = privacy_engine.get_epsilon(DELTA)
    print(f"accuracy {right:.1%}, epsilon {epsilon} after training")
    return float(right), epsilon


if __name__ == "__main__":
    main()
