"""Federated Select: each client downloads and trains only the slices of the model that it selects.

Charles, Bonawitz, Chiknavaryan, McMahan and Agüera y Arcas 2022, "Federated Select: A Primitive for
Communication- and Memory-Efficient Federated Learning".
"""

from privpart.select.delivery import (
    DeviceOnly,
    SelectLedger,
    broadcast,
    on_demand,
    pregenerated,
    private,
    select_claims,
)
from privpart.select.engine import SelectEngine, localize_tokens
from privpart.select.keys import (
    IndependentKeys,
    SharedKeys,
    StructuredKeys,
    random,
    random_top,
    top,
)
from privpart.select.layout import KeySpace, Layout, Part

__all__ = [
    "DeviceOnly",
    "IndependentKeys",
    "KeySpace",
    "Layout",
    "Part",
    "SelectEngine",
    "SelectLedger",
    "SharedKeys",
    "StructuredKeys",
    "broadcast",
    "localize_tokens",
    "on_demand",
    "pregenerated",
    "private",
    "random",
    "random_top",
    "select_claims",
    "top",
]
