"""pfl-research's side of ``peers.py``: FederatedAveraging on its SimulatedBackend.

Run by ``peers.py`` in an environment with pfl: ``python peers_pfl.py CASE.npz SUM.npz THREADS``, or
by torchrun, which splits the cohort over its processes. The central optimiser's rate is 0, so
every round begins with the same parameters.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from peers_work import BATCH, CLIP, Work, next_round, read
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.selector import get_framework_module
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism, NormClippingOnly
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

_MANY = 10**9


class Module(nn.Module):
    """The network with the two methods that pfl requires."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        return cross_entropy(self.inner(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Return the loss as a metric; only the first round, which is not timed, uses it."""
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class Turns(TrainingProcessCallback):
    """Waits for the benchmark before every round; after the first, saves the sum of the updates."""

    def __init__(self, result: Path, clients: int) -> None:
        self.result, self.clients = result, clients

    def _stop(self) -> bool:
        world = get_framework_module().distributed
        more = torch.ones(1)
        if world.global_rank == 0:
            more[0] = next_round()
        if world.world_size > 1:
            torch.distributed.broadcast(more, src=0)
        return not more

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """Wait for the first round."""
        self._stop()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Save the sum of the first round: pfl stores minus the mean in the gradients."""
        if central_iteration == 0 and get_framework_module().distributed.global_rank == 0:
            trained = model.variable_map.items()
            total = {name.removeprefix("inner."): -self.clients * v.grad for name, v in trained}
            np.savez(self.result, **{name: t.numpy() for name, t in total.items()})
        return self._stop(), Metrics()


def run(work: Work, result: Path) -> None:
    """Run rounds until the benchmark needs no more."""
    clients = len(work.y)

    def user(client: int) -> PyTorchTensorDataset:
        return PyTorchTensorDataset((work.x[client], work.y[client]), user_id=client)

    users = FederatedDataset(user, get_user_sampler("minimize_reuse", list(range(clients))))
    clipping = CentrallyAppliedPrivacyMechanism(NormClippingOnly(order=2, clipping_bound=CLIP))
    module = Module(work.module)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=_MANY,
            evaluation_frequency=_MANY,
            train_cohort_size=clients,
            val_cohort_size=None,
        ),
        SimulatedBackend(users, users, postprocessors=[WeightByUser(), clipping]),
        PyTorchModel(
            module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        ),
        NNTrainHyperParams(
            local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=work.rate
        ),
        callbacks=[Turns(result, clients)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    # The processes of torchrun must draw the same users; pfl draws them by numpy's global state.
    np.random.seed(0)  # noqa: NPY002
    run(read(Path(sys.argv[1])), Path(sys.argv[2]))
