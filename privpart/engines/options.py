"""Engine options: how simulated clients are computed, and what a training cannot use.

No torch is imported here, so the command line can read the allowed values at start-up.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from accounting import checks
from accounting.checks import ConfigError

if TYPE_CHECKING:
    import torch

    from privpart.settings.client import LocalTraining

Batching = Literal["auto", "loop", "vmap"]
Precision = Literal["float32", "tf32", "bfloat16"]

_CHUNK_BYTES = 2**24
"""Larger blocks are returned to the system when freed, and their pages cleared at the next use."""
_LARGEST_COPY = 2**30
"""Bytes of updates that are copied from an accelerator at once, and which the CPU holds."""
_PARTS = 16
"""An accelerator has for each client an update, parameters, a gradient, Adam's state, and what its
layers keep."""
_LARGEST_CHUNK = 128


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine computes clients: they change the speed, never the guarantee.

    Args:
        workers: number of processes, >= 1, of which the calling one is the first. The others start
            once it is expected to compute clients for three seconds by the end of a round, which a
            job of a few rounds may not take, or at once for a network of 4 million parameters; the
            script must start its work under ``if __name__ == "__main__":``.
        batching: "loop" computes one client after another, "vmap" computes many clients as one
            vectorized computation, and "auto" takes what is fastest by the network and the training
            (``privpart.engines.choice``), once it agrees with "loop" on two clients.
        cache_prefix: whether to keep the outputs of the frozen layers below the lowest trained one,
            if it is exact, fits into memory, and batching is not "loop". The cache is dropped when
            the frozen part changes, except when it is changed through ``.data``.
        deterministic: return the same bits for any number of workers; implies "loop" without cache.
        precision: "bfloat16" rounds the factors of matrix products and convolutions to 8 bits.
            Parameters, updates and clipping stay float32, and so do a cached prefix, ghost clipping
            and vectorized convolutions. It is faster for large layers on processors with bfloat16
            instructions, and slower for small networks (``privpart doctor --plan`` measures it);
            updates change by 1e-2 to 1e-1 of their norm. "tf32" lets a CUDA device round the
            factors to 10 bits, in every way to compute clients; "float32" keeps it from rounding
            convolutions so, as torch does.
        sums: allow the engine to return sums of updates that it clipped itself: of vectorized
            clients, of clients with ``steps=1`` by ghost clipping, and of all clients on an
            accelerator. The server cannot clip those updates again.
        device: "cpu" or an accelerator, such as "cuda:1", which one process drives. Updates are
            clipped there and copied back once per chunk of clients. The order of the examples is
            the same on every device; dropout masks differ.
        worker_timeout: seconds after which a worker process that does not answer is taken to hang,
            which ends the round. It answers after each chunk of up to 128 clients. None allows 15
            minutes at first; then a minute, or 50 times as long per client as the slowest so far.

    Raises:
        ConfigError: a value that is not allowed, or options that contradict each other.
    """

    workers: int = 1
    batching: Batching = "auto"
    cache_prefix: bool = True
    deterministic: bool = False
    precision: Precision = "float32"
    sums: bool = False
    device: "str | torch.device" = "cpu"
    worker_timeout: float | None = None

    def __post_init__(self) -> None:
        checks.count("workers", self.workers)
        checks.choice("batching", self.batching, get_args(Batching))
        checks.choice("precision", self.precision, get_args(Precision))
        if self.worker_timeout is not None:
            checks.positive("worker_timeout", self.worker_timeout)
        vectorizes = self.batching == "vmap"
        _refuse_first(
            self.deterministic and vectorizes,
            "batching=vmap: a run that can be repeated (deterministic=True, or noise from a seed) "
            "computes one client after another; use auto or loop.",
            # torch promises this for some operations only ("Reproducibility" in its manual)
            self.deterministic and not self.on_cpu,
            f"device={self.device}: does not give the same bits every time, which "
            "deterministic=True and noise from a seed require; use device='cpu'.",
            self.precision == "tf32" and not str(self.device).startswith("cuda"),
            f"precision=tf32: only CUDA devices round so, and device={self.device}; use "
            "device='cuda', or another precision.",
            self.worker_timeout and self.workers == 1,
            f"worker_timeout={self.worker_timeout or 0:g}: one process has no workers to wait for; "
            "leave it out, or set workers.",
            not self.on_cpu and self.workers > 1,
            f"device={self.device}: one process drives it; use workers=1.",
        )

    @property
    def on_cpu(self) -> bool:
        """Whether clients are computed on the CPU."""
        return str(self.device).partition(":")[0] == "cpu"

    def chunk_size(self, dim: int, free: int | None = None) -> int:
        """Return how many clients, with updates of shape (dim,), are computed at once at most.

        Args:
            dim: number of parameters that train.
            free: bytes of an accelerator; None on the CPU.
        """
        room = _CHUNK_BYTES if free is None else min(_LARGEST_COPY, free // _PARTS)
        return max(1, min(_LARGEST_CHUNK, room // (4 * dim)))

    def refuse(
        self,
        local: "LocalTraining",
        *,
        selects: bool = False,
        fetches: bool = False,
        local_parts: bool = False,
    ) -> None:
        """Check that a training uses every option that was set.

        Args:
            local: how each client trains.
            selects: whether clients download slices of the model (``SelectEngine``).
            fetches: whether each client's examples are fetched when it trains, as those of any
                population but ``Users`` are.
            local_parts: whether the model has parameters that never leave the client.

        Raises:
            ConfigError: an option that this training would ignore, or that its first round could
                not follow.
        """
        alone = selects or local.objective == "moon" or local_parts
        vectorizes = self.batching == "vmap"
        plain = local.objective == "fedavg" and local.loss == "cross_entropy"
        own_memory = {
            "workers": self.workers != 1,
            "precision": self.precision != "float32",
            "device": not self.on_cpu,
        }
        idle = next((name for name, given in own_memory.items() if alone and given), "")
        _refuse_first(
            idle,
            f"{idle}={idle and getattr(self, idle)}: clients that select, train with the objective "
            "moon, or keep a local part, are computed in float32 on the cpu and in one process; "
            "leave it out.",
            vectorizes and (selects or not plain),
            "batching=vmap: clients that select, or have another objective than fedavg or another "
            "loss than cross_entropy, are computed one after another; use auto or loop.",
            vectorizes and (fetches or local_parts or local.augment is not None),
            "batching=vmap: clients whose examples are fetched or augmented, or that keep a local "
            "part, are computed one after another; use auto or loop.",
        )


def _refuse_first(*faults: object) -> None:
    """Raise ConfigError with the sentence that follows the first condition that holds."""
    for holds, sentence in zip(faults[::2], faults[1::2], strict=True):
        if holds:
            raise ConfigError(str(sentence))


def changes_inputs(local: "LocalTraining") -> bool:
    """Return whether a step may compute something else of an example than the whole network's loss.

    The outputs of a frozen prefix cannot take the example's place then.
    """
    named = isinstance(local.loss, str) and local.loss != "model"
    return local.augment is not None or not named
