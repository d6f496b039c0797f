"""Description: a model's parameters as rows, and as the table that a person reads."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter of a model.

    Attributes:
        name: its name in the module.
        shape: its shape.
        numbers: how many numbers it has.
        share: of all numbers of the model, in [0, 1].
        trained: whether it trains.
    """

    name: str
    shape: tuple[int, ...]
    numbers: int
    share: float
    trained: bool


class Description(tuple[ParameterRow, ...]):
    """Rows in the module's order; ``str`` gives the table with totals."""

    __slots__ = ()

    def __str__(self) -> str:
        lines = [("parameter", "shape", "numbers", "share", "")]
        lines += [
            _line(
                row.name, row.numbers, row.share, "trained" if row.trained else "frozen", row.shape
            )
            for row in self
        ]
        for kind, wanted in (("trained", (True,)), ("frozen", (False,)), ("all", (True, False))):
            rows = [row for row in self if row.trained in wanted]
            lines.append(_line(kind, sum(r.numbers for r in rows), sum(r.share for r in rows)))
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        text = [
            f"{name:<{widths[0]}}  {shape:<{widths[1]}}  {numbers:>{widths[2]}}  "
            f"{share:>{widths[3]}}  {state}".rstrip()
            for name, shape, numbers, share, state in lines
        ]
        rule = "-" * max(map(len, text))
        return "\n".join([text[0], rule, *text[1:-3], rule, *text[-3:]])


def _line(
    name: str, numbers: int, share: float, state: str = "", shape: tuple[int, ...] = ()
) -> tuple[str, str, str, str, str]:
    sizes = " x ".join(map(str, shape))
    return name, sizes, f"{numbers:,}", f"{100 * share:.2f} %", state
