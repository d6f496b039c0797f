"""Dense: any lower-triangular encoder, given as a matrix. For reference and small n."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from accounting.checks import ConfigError
from accounting.mechanisms.mechanism import prefix_sums, record
from accounting.participation import Participation
from accounting.sensitivity import Sensitivity, gram_sensitivity, same_rounds


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """The mechanism whose encoder is ``matrix``.

    Args:
        matrix: C, shape (n, n), finite, lower triangular (so that the guarantee holds when rounds
            depend on earlier releases) with a positive diagonal. Copied, and read-only after.

    Streaming noise of round t: y_t = (z_t - sum_{j<t} C_tj y_j) / C_tt, from all earlier y.

    Raises:
        ConfigError: not such a matrix.

    >>> Dense([[1.0, 0.0], [0.5, 1.0]]).prefix_variance()
    array([1.  , 1.25])
    """

    matrix: NDArray[np.float64]

    def __init__(self, matrix: ArrayLike) -> None:
        copied = _lower_triangular(matrix)
        copied.flags.writeable = False
        object.__setattr__(self, "matrix", copied)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dense) and np.array_equal(self.matrix, other.matrix)

    def __hash__(self) -> int:
        return hash((self.rounds, self.matrix.tobytes()))

    @property
    def name(self) -> str:
        """Short name, as on the command line."""
        return "dense"

    @property
    def rounds(self) -> int:
        """Number of rounds n."""
        return len(self.matrix)

    def to_dict(self) -> dict[str, Any]:
        """The matrix, for JSON; see ``mechanism_from_dict``."""
        return record(self)

    def encoder(self) -> NDArray[np.float64]:
        """C, shape (n, n)."""
        return self.matrix

    def decoder(self) -> NDArray[np.float64]:
        """B = A C^-1, shape (n, n)."""
        from scipy.linalg import solve_triangular

        transposed = solve_triangular(
            self.matrix, prefix_sums(self.rounds).T, lower=True, trans="T"
        )
        return np.tril(np.asarray(transposed, dtype=np.float64).T)

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """By the rules for any Gram matrix: exact where they are, else an upper bound."""
        same_rounds(self.rounds, participation)
        return gram_sensitivity(self.matrix.T @ self.matrix, participation)

    def prefix_variance(self) -> NDArray[np.float64]:
        """Squared row norms of B."""
        return np.asarray((self.decoder() ** 2).sum(axis=1))


def _lower_triangular(matrix: ArrayLike) -> NDArray[np.float64]:
    try:
        copied = np.array(matrix, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError("matrix: must be a square array of numbers.") from None
    if copied.ndim != 2 or copied.shape[0] != copied.shape[1] or not copied.size:
        raise ConfigError(f"matrix: has shape {copied.shape}; must be square, one row per round.")
    if not np.isfinite(copied).all():
        raise ConfigError("matrix: every entry must be finite.")
    if np.triu(copied, 1).any():
        raise ConfigError(
            "matrix: must be lower triangular; noise that looks ahead has no guarantee when rounds "
            "depend on earlier releases."
        )
    if not (np.diag(copied) > 0).all():
        raise ConfigError("matrix: every diagonal entry must be positive.")
    return copied
