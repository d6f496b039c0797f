"""Training part of a model under differential privacy, in federated learning.

Names are imported when they are used, so that ``privpart epsilon`` never pays for torch.
"""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from privpart.client import client_update
    from privpart.data.users import Users
    from privpart.engines.distributed import DistributedEngine
    from privpart.engines.embedded import EmbeddedEngine
    from privpart.engines.protocol import Engine
    from privpart.engines.secure import SecureEngine
    from privpart.example_level import FTRLEngine
    from privpart.flower.engine import FlowerEngine
    from privpart.flower.node import client_app
    from privpart.flower.server import server_app
    from privpart.loop import (
        CohortRefusedError,
        CohortTooSmallError,
        DivergedError,
        RoundRecord,
        StopTraining,
        fit,
    )
    from privpart.messages import ClientUpdate, RoundTask
    from privpart.model import PartialModel
    from privpart.noise.cohorts import SampledCohorts
    from privpart.noise.source import NoiseSource, SecretSource, SeededSource
    from privpart.noise.stream import NoiseStream
    from privpart.plan import AdaptiveClipping, PrivacyPlan
    from privpart.pool import WorkerError
    from privpart.run.begin import create_run
    from privpart.run.folder import RunFolder
    from privpart.run.members import sign_move
    from privpart.secure.rules import SecureSums
    from privpart.server import RoundCounts, Server
    from privpart.settings.client import LocalTraining
    from privpart.settings.server import ServerOptimizer
    from privpart.start_values import Constant, Glorot, He, Normal, Uniform
    from privpart.study.tune import tune
    from privpart.training.callbacks import TensorBoard
    from privpart.training.metric import Accuracy
    from privpart.training.train import Run, train

_NAMES = {
    "client": "client_update",
    "data.users": "Users",
    "engines.distributed": "DistributedEngine",
    "engines.embedded": "EmbeddedEngine",
    "engines.protocol": "Engine",
    "engines.secure": "SecureEngine",
    "example_level": "FTRLEngine",
    "flower.engine": "FlowerEngine",
    "flower.node": "client_app",
    "flower.server": "server_app",
    "loop": "CohortRefusedError CohortTooSmallError DivergedError RoundRecord StopTraining fit",
    "messages": "ClientUpdate RoundTask",
    "model": "PartialModel",
    "noise.cohorts": "SampledCohorts",
    "noise.source": "NoiseSource SecretSource SeededSource",
    "noise.stream": "NoiseStream",
    "plan": "AdaptiveClipping PrivacyPlan",
    "pool": "WorkerError",
    "run.begin": "create_run",
    "run.folder": "RunFolder",
    "run.members": "sign_move",
    "secure.rules": "SecureSums",
    "server": "RoundCounts Server",
    "settings.client": "LocalTraining",
    "settings.server": "ServerOptimizer",
    "start_values": "Constant Glorot He Normal Uniform",
    "study.tune": "tune",
    "training.callbacks": "TensorBoard",
    "training.metric": "Accuracy",
    "training.train": "Run train",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Accuracy",
    "AdaptiveClipping",
    "ClientUpdate",
    "CohortRefusedError",
    "CohortTooSmallError",
    "Constant",
    "DistributedEngine",
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
    "SecureEngine",
    "SecureSums",
    "SeededSource",
    "Server",
    "ServerOptimizer",
    "StopTraining",
    "TensorBoard",
    "Uniform",
    "Users",
    "WorkerError",
    "client_app",
    "client_update",
    "create_run",
    "fit",
    "server_app",
    "sign_move",
    "train",
    "tune",
]


def _refuse_namesakes() -> None:
    """Raise ImportError if a package of another distribution stands in the place of ours."""
    for name in ("accounting", "attacks"):
        own, spec = Path(__file__).parents[1] / name / "__init__.py", find_spec(name)
        found = spec.origin if spec is not None else None
        ours = found is not None and Path(found).resolve() == own.resolve()
        if not (ours and own.read_text("utf-8").startswith(f'"""{name.capitalize()}: what ')):
            where = f"{found or 'nowhere'}: another package of that name hides privpart's"
            raise ImportError(f"{name} is found at {where}. Rename or uninstall it.", name=name)


_refuse_namesakes()


def __getattr__(name: str) -> Any:  # noqa: ANN401  PEP 562
    if name in _HOME:
        return getattr(import_module(f"privpart.{_HOME[name]}"), name)
    if name == "__version__":
        return version("privpart")
    raise AttributeError(f"module 'privpart' has no attribute {name!r}")
