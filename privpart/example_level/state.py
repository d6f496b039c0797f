"""State: what a run folder keeps after each step, and gives back when the run is resumed."""

import json
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from accounting.checks import ConfigError
from privpart.example_level.optimizer import FTRLOptimizer
from privpart.example_level.processes import Processes
from privpart.messages import ClientId
from privpart.noise.source import NoiseSource
from privpart.plan import PrivacyPlan

_SCHEMA = "privpart/example-level/1"


class StepState:
    """What a run folder keeps after each step; see ``Committed``."""

    def __init__(self, plan: PrivacyPlan, source: NoiseSource, optimizer: FTRLOptimizer) -> None:
        self.plan_hash = plan.hash
        self.last_clip_norm = plan.clip_norm
        self.source = source
        self._optimizer = optimizer

    @property
    def round(self) -> int:
        """Steps done."""
        return self._optimizer.passes.done

    @property
    def _device(self) -> torch.device:
        first: Tensor = self._optimizer.trained[0]
        return first.device

    @property
    def cohort(self) -> tuple[int, ...]:
        """Numbers of the examples of the last step."""
        return tuple(self._optimizer.passes.batch(self.round - 1))

    @property
    def parameters(self) -> Tensor:
        """The released parameters, shape (d,)."""
        return torch.cat([p.detach().reshape(-1).float().cpu() for p in self._optimizer.trained])

    @property
    def checkpoint(self) -> int:
        """The last step, up to now, after which the registers of the noise are to be saved."""
        return self._optimizer.noise.checkpoint

    @property
    def registers(self) -> list[str]:
        """Names of the tensors of a state that follow from the key."""
        return ["noise"] if self._optimizer.noise.registers else []

    def load_start(self, start: Tensor) -> None:
        """Raise: runs of examples are not forked."""
        raise ConfigError("a run of examples is not a fork: it has no start model of its own.")

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return parameters, optimiser, scheduler, noise and torch's random numbers.

        After the last step there is no noise: whoever read it could subtract it.
        """
        stream = self._optimizer.noise
        noise = stream.state_dict() if self.round < stream.mechanism.rounds else None
        original, scheduler = self._optimizer.original_optimizer, self._optimizer.scheduler
        tensors = {"parameters": self.parameters, "random": torch.get_rng_state().to(torch.int32)}
        if self._device.type == "cuda":
            tensors["random_device"] = torch.cuda.get_rng_state(self._device).to(torch.int32)
        tensors |= _kept_state(original)
        # absent where the draws can be made again
        if noise is not None and "state" in noise:
            tensors["noise"] = noise.pop("state")
        values = {"schema": _SCHEMA, "plan": self.plan_hash, "round": self.round, "noise": noise}
        return tensors, values | settings_of(original, scheduler)

    def share(self, processes: Processes) -> None:
        """Bring other processes to the first one's state, without noise and random numbers."""
        if processes.count == 1:
            return
        tensors, values = self.state_dict()
        for name in ("noise", "random", "random_device"):
            tensors.pop(name, None)
        tensors, values = processes.of_first((tensors, values | {"noise": None}))
        if not processes.is_first:
            self.load_state_dict(tensors, values, {})

    def load_state_dict(
        self,
        tensors: dict[str, Tensor],
        values: dict[str, Any],
        participations: dict[ClientId, list[int]],
    ) -> None:
        """Restore what ``state_dict`` returned; refuse that of another run or module."""
        if values.get("schema") != _SCHEMA or values.get("plan") != self.plan_hash:
            raise ConfigError("the state is of another run, or not of one of examples.")
        unread = dict(tensors)
        parameters, random = unread.pop("parameters"), unread.pop("random", None)
        if parameters.shape != self.parameters.shape:
            raise ConfigError("the state is of another module.")
        if (coins := unread.pop("random_device", None)) is not None and self._device.type == "cuda":
            torch.cuda.set_rng_state(coins.to(torch.uint8), self._device)
        noise, registers = values["noise"], unread.pop("noise", None)
        # none after the last step, nor in the processes beside the first one
        if noise is not None:
            more = {} if registers is None else {"state": registers}
            since = values["registers"]["round"] if "registers" in values else values["round"]
            self._optimizer.noise.load_state_dict({**noise, **more}, since=since)
        parts = torch.split(parameters, [p.numel() for p in self._optimizer.trained])
        with torch.no_grad():
            for p, part in zip(self._optimizer.trained, parts, strict=True):
                p.copy_(part.view_as(p))
        self._load_optimizer(unread, values["groups"])
        self._optimizer.load_scheduler(values["scheduler"])
        # last, since loading may draw
        if random is not None:
            torch.set_rng_state(random.to(torch.uint8))
        self._optimizer.passes.resume(values["round"])

    def _load_optimizer(self, tensors: dict[str, Tensor], groups: list[dict[str, Any]]) -> None:
        original = self._optimizer.original_optimizer
        restored: dict[str, Any] = original.state_dict()
        # optimizers of torch have no state before their first step
        restored["state"] = {}
        for key, value in tensors.items():
            _, number, name = key.split(".", 2)
            restored["state"].setdefault(int(number), {})[name] = value
        original.load_state_dict(restored)
        for group, settings in zip(original.param_groups, groups, strict=True):
            group.update(settings)


def settings_of(optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None) -> dict[str, Any]:
    """Return the settings of an optimizer and of its scheduler, as a file of JSON has them.

    Raises:
        ConfigError: they cannot be kept in one.
    """
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    values = {"groups": groups, "scheduler": None if scheduler is None else scheduler.state_dict()}
    try:
        kept: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer, scheduler: their settings cannot be kept in a file: {error}."
        ) from None
    return kept


def _kept_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state by name; there is none before the first step."""
    tensors = {}
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{number}.{name}"] = value.cpu()
            elif value is not None:
                raise ConfigError(
                    f"optimizer: keeps {name!r} as a {type(value).__name__}, and a run folder only "
                    "tensors, so a resumed run would differ. Use another optimizer, or no folder."
                )
    return tensors
