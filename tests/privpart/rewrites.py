"""Every kind of write to a tensor that torch does not count."""


def _exchange(tensor, other, _):
    mine = tensor.data.clone()
    tensor.data.copy_(other.data)
    other.data.copy_(mine)


def _move(tensor, *_):
    tensor.data = tensor.data.flip(0)


REWRITES = {
    "add": lambda tensor, other, number: tensor.data.add_(number),
    "permute": lambda tensor, *_: tensor.data.copy_(
        tensor.data.flatten()[tensor.data.flatten().argsort()].view_as(tensor)
    ),
    "swap": lambda tensor, *_: tensor.data.copy_(tensor.data.roll(1, 0)),
    "replace": lambda tensor, other, number: tensor.data.fill_(number),
    "sign": lambda tensor, *_: tensor.data.neg_(),
    "exchange": _exchange,
    "move": _move,
}
