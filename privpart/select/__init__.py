"""Federated Select: each client downloads and trains only the slices of the model that it selects.

Charles, Bonawitz, Chiknavaryan, McMahan and Agüera y Arcas 2022, "Federated Select: A Primitive for
Communication- and Memory-Efficient Federated Learning".
"""

from privpart.select.delivery import (
    DeviceOnly,
    SelectLedger,
    SelectReport,
    broadcast,
    on_demand,
    pregenerated,
    private,
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
from privpart.select.layout import KeySpace, Layout, Part, aggregate_mean, fed_select

__all__ = [
    "DeviceOnly",
    "IndependentKeys",
    "KeySpace",
    "Layout",
    "Part",
    "SelectEngine",
    "SelectLedger",
    "SelectReport",
    "SharedKeys",
    "StructuredKeys",
    "aggregate_mean",
    "broadcast",
    "fed_select",
    "localize_tokens",
    "on_demand",
    "pregenerated",
    "private",
    "random",
    "random_top",
    "top",
]
