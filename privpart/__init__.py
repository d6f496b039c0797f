"""Training part of a model under differential privacy, in federated learning.

Names are imported when they are used, so that ``privpart epsilon`` never pays for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from privpart.client import ClientUpdate, LocalTraining, client_update
    from privpart.engine import EmbeddedEngine, Engine, Users
    from privpart.initializers import Constant, Glorot, He, Normal, Uniform
    from privpart.keystream import NoiseSource, SecretSource, SeededSource
    from privpart.loop import RoundRecord, fit
    from privpart.noise import NoiseStream
    from privpart.partial import PartialModel
    from privpart.plan import PrivacyPlan
    from privpart.server import RoundCounts, Server

_HOME = {
    "ClientUpdate": "client",
    "Constant": "initializers",
    "EmbeddedEngine": "engine",
    "Engine": "engine",
    "Glorot": "initializers",
    "He": "initializers",
    "LocalTraining": "client",
    "NoiseSource": "keystream",
    "NoiseStream": "noise",
    "Normal": "initializers",
    "PartialModel": "partial",
    "PrivacyPlan": "plan",
    "RoundCounts": "server",
    "RoundRecord": "loop",
    "SecretSource": "keystream",
    "SeededSource": "keystream",
    "Server": "server",
    "Uniform": "initializers",
    "Users": "engine",
    "client_update": "client",
    "fit": "loop",
}

__all__ = [
    "ClientUpdate",
    "Constant",
    "EmbeddedEngine",
    "Engine",
    "Glorot",
    "He",
    "LocalTraining",
    "NoiseSource",
    "NoiseStream",
    "Normal",
    "PartialModel",
    "PrivacyPlan",
    "RoundCounts",
    "RoundRecord",
    "SecretSource",
    "SeededSource",
    "Server",
    "Uniform",
    "Users",
    "client_update",
    "fit",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401  PEP 562
    if name in _HOME:
        return getattr(import_module(f"privpart.{_HOME[name]}"), name)
    raise AttributeError(f"module 'privpart' has no attribute {name!r}")
