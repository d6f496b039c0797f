"""Digits: scikit-learn's 1,797 real 8x8 images, shipped in its wheel (UCI optdigits, test part)."""

import numpy as np
import torch

from privpart.data.tasks.task import Task

_TEST = 360
_SPLIT_SEED = 0


def digits() -> Task:
    """Return 1,437 training and 360 test images, the same split every time."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(images))
    x = torch.tensor(images[order] / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.tensor(labels[order], dtype=torch.int64)
    return Task("digits", x[:-_TEST], y[:-_TEST], x[-_TEST:], y[-_TEST:])
