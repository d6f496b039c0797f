"""Federated Select: each client downloads and trains only the slices of the model that it selects.

Charles, Bonawitz, Chiknavaryan, McMahan and Agüera y Arcas 2022, "Federated Select: A Primitive for
Communication- and Memory-Efficient Federated Learning".
"""

from privpart.select.delivery import (
    QUANTIZED_ROWS,
    ROWS,
    broadcast,
    on_demand,
    on_demand_uncached,
    pregenerated,
    private,
)
from privpart.select.disclosure import (
    DeviceOnly,
    Released,
    SelectLedger,
    SelectReport,
    ServerSees,
    publish,
)
from privpart.select.engine import SelectEngine, localize_bags, localize_tokens
from privpart.select.keys import (
    IndependentKeys,
    SharedKeys,
    StructuredKeys,
    random,
    random_top,
    top,
)
from privpart.select.layout import KeySpace, Layout, Part
from privpart.select.primitive import aggregate_mean, fed_select

__all__ = [
    "QUANTIZED_ROWS",
    "ROWS",
    "DeviceOnly",
    "IndependentKeys",
    "KeySpace",
    "Layout",
    "Part",
    "Released",
    "SelectEngine",
    "SelectLedger",
    "SelectReport",
    "ServerSees",
    "SharedKeys",
    "StructuredKeys",
    "aggregate_mean",
    "broadcast",
    "fed_select",
    "localize_bags",
    "localize_tokens",
    "on_demand",
    "on_demand_uncached",
    "pregenerated",
    "private",
    "publish",
    "random",
    "random_top",
    "top",
]
