"""Dense: the forward pass of clients who each hold dense layers of their own, without torch.func.

vmap's bookkeeping takes a small network as long as its products, and it returns a weight's gradient
transposed, which takes longer to add to the weight than the product did. Here an example is a
column, and the gradient of a weight is laid out as the weight is.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from privpart.engines.frozen_prefix import functions_of_the_example, named_layers

_LAYERS = (nn.Linear, nn.ReLU, nn.GELU, nn.Sigmoid, nn.Tanh, nn.Identity, nn.Flatten)


def is_dense(network: nn.Module, x: Tensor) -> bool:
    """Whether ``dense_logits`` computes what a network does of examples x, shape (n, ...).

    It does of layers that follow each other, none of them tied to another, once each example is a
    single row of numbers.
    """
    if type(network) is not nn.Sequential or not functions_of_the_example(network):
        return False
    parameters = list(network.named_parameters(remove_duplicate=False))
    flattened = x.dim() == 2 or (len(network) > 0 and _flattens(network[0]))
    return (
        flattened
        and all(type(layer) in _LAYERS for layer in network)
        and all(_flattens(layer) for layer in network if type(layer) is nn.Flatten)
        and len({id(parameter) for _, parameter in parameters}) == len(parameters)
    )


def _flattens(layer: nn.Module) -> bool:
    """Whether one row of each example's numbers comes out."""
    return type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1)


def dense_logits(network: nn.Module, own: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return V clients' logits, shape (V, n, classes).

    Args:
        network: as ``is_dense`` allows; the parameters that are not in ``own`` are everyone's.
        own: by name, each client's parameters, shapes (V, ...).
        x: each client's examples, shape (V, n, ...).
    """
    columns = x.flatten(2).mT
    for name, layer in named_layers(network):
        if type(layer) is not nn.Linear:
            columns = columns if type(layer) is nn.Flatten else layer(columns)
            continue
        weight = own.get(f"{name}.weight", layer.weight).expand(len(x), -1, -1)
        bias: Tensor | None = own.get(f"{name}.bias", layer.bias)
        if bias is None:
            columns = torch.bmm(weight, columns)
        else:
            columns = torch.baddbmm(bias.unsqueeze(-1), weight, columns)
    return columns.mT
