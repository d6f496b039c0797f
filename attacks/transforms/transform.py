"""Transform: what a client does to its update before it sends it, and how an attack matches it."""

from collections.abc import Callable, Mapping
from typing import ClassVar, Self

from torch import Tensor

Update = Mapping[str, Tensor]
Step = Callable[[Update], dict[str, Tensor]]


class Transform:
    """One step between an update and what is sent; each kind is a frozen dataclass.

    ``str`` of a transform is how it is declared. An update is tensors by name, never empty; what is
    returned has the same names and shapes, and can be differentiated, also by ``torch.func``.
    """

    form: ClassVar[str]  # an example of how it is declared
    loses: ClassVar[bool] = False  # whether ``towards`` matches what is sent better than calling it
    clients: int = 1  # number of clients whose updates are summed

    @classmethod
    def parsed(cls, argument: str) -> Self:
        """Return the transform that "kind:argument" declares.

        Raises:
            ValueError: the argument is none of this kind's.
        """
        raise NotImplementedError

    def __call__(self, update: Update) -> dict[str, Tensor]:
        """Return what is sent of ``update``."""
        raise NotImplementedError

    def towards(self, sent: Update) -> Step:
        """Return what maps an update to the nearest to ``sent`` of all that it may have led to.

        An attack brings it to ``sent``; that of the true update is there. The result has the names
        of ``sent``, which may be some of the update's; one that ``loses`` is scaled as its update.
        """
        return self.__call__

    def checked(self, sent: Update) -> Step:
        """Return what maps the true update to ``sent``, by any convention of this kind."""
        return self.__call__

    @classmethod
    def recognised(cls, sent: Update, plain: Update) -> Self | None:
        """Return the transform that ``sent`` looks to have had; ``plain`` is of no transform."""
        return None


def straight(exact: Tensor, smooth: Tensor) -> Tensor:
    """Return ``exact`` with the slope of ``smooth``: rounding has none of its own."""
    return smooth + (exact - smooth).detach()


def share(argument: str) -> float:
    """Return a number above 0 and at most 1."""
    value = float(argument)
    if not 0 < value <= 1:
        raise ValueError
    return value


def number(argument: str, most: int) -> int:
    """Return a whole number from 2 to ``most``."""
    value = int(argument)
    if not 2 <= value <= most:
        raise ValueError
    return value
