"""Task: public description of a data set, split into training and test images."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Task:
    """Images in [0, 1] with classes.

    Attributes:
        name: as on the command line.
        train_x: shape (n, channels, size, size), float32.
        train_y: shape (n,), int64.
        test_x: shape (m, channels, size, size), float32.
        test_y: shape (m,), int64.
    """

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
