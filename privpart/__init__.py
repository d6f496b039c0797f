"""Training part of a model under differential privacy, in federated learning.

Names are imported when they are used, so that ``privpart epsilon`` never pays for torch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from privpart.client import LocalTraining, client_update
    from privpart.data.users import Users
    from privpart.engines.embedded import EmbeddedEngine
    from privpart.engines.protocol import Engine
    from privpart.example_level import FTRLEngine
    from privpart.flower.engine import FlowerEngine
    from privpart.flower.node import client_app
    from privpart.flower.server import server_app
    from privpart.loop import (
        CohortRefusedError,
        CohortTooSmallError,
        DivergedError,
        RoundRecord,
        fit,
    )
    from privpart.messages import ClientUpdate, RoundTask
    from privpart.model import PartialModel
    from privpart.noise.cohorts import SampledCohorts
    from privpart.noise.source import NoiseSource, SecretSource, SeededSource
    from privpart.noise.stream import NoiseStream
    from privpart.optimizer import ServerOptimizer
    from privpart.plan import AdaptiveClipping, PrivacyPlan
    from privpart.pool import WorkerError
    from privpart.run.folder import RunFolder
    from privpart.server import RoundCounts, Server
    from privpart.start_values import Constant, Glorot, He, Normal, Uniform
    from privpart.training.metric import Accuracy
    from privpart.training.train import Run, train

_HOME = {
    "Accuracy": "training.metric",
    "AdaptiveClipping": "plan",
    "ClientUpdate": "messages",
    "CohortRefusedError": "loop",
    "CohortTooSmallError": "loop",
    "Constant": "start_values",
    "DivergedError": "loop",
    "EmbeddedEngine": "engines.embedded",
    "Engine": "engines.protocol",
    "FTRLEngine": "example_level",
    "FlowerEngine": "flower.engine",
    "Glorot": "start_values",
    "He": "start_values",
    "LocalTraining": "client",
    "NoiseSource": "noise.source",
    "NoiseStream": "noise.stream",
    "Normal": "start_values",
    "PartialModel": "model",
    "PrivacyPlan": "plan",
    "RoundCounts": "server",
    "RoundRecord": "loop",
    "RoundTask": "messages",
    "Run": "training.train",
    "RunFolder": "run.folder",
    "SampledCohorts": "noise.cohorts",
    "SecretSource": "noise.source",
    "SeededSource": "noise.source",
    "Server": "server",
    "ServerOptimizer": "optimizer",
    "Uniform": "start_values",
    "Users": "data.users",
    "WorkerError": "pool",
    "client_app": "flower.node",
    "client_update": "client",
    "fit": "loop",
    "server_app": "flower.server",
    "train": "training.train",
}

__all__ = [
    "Accuracy",
    "AdaptiveClipping",
    "ClientUpdate",
    "CohortRefusedError",
    "CohortTooSmallError",
    "Constant",
    "DivergedError",
    "EmbeddedEngine",
    "Engine",
    "FTRLEngine",
    "FlowerEngine",
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
    "RoundTask",
    "Run",
    "RunFolder",
    "SampledCohorts",
    "SecretSource",
    "SeededSource",
    "Server",
    "ServerOptimizer",
    "Uniform",
    "Users",
    "WorkerError",
    "client_app",
    "client_update",
    "fit",
    "server_app",
    "train",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401  PEP 562
    if name in _HOME:
        return getattr(import_module(f"privpart.{_HOME[name]}"), name)
    if name == "__version__":
        return version("privpart")
    raise AttributeError(f"module 'privpart' has no attribute {name!r}")
