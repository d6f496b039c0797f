"""Checkpoints: weights and optimiser in a file of the user's, as Opacus writes them.

A checkpoint holds what a step released, never noise or its key: whoever copied it and went on from
both copies would put two sums under one noise. What continues a run is in its folder, which is at
the newest step; loading a checkpoint of before takes no step back.
"""

import pickle
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accounting.checks import ConfigError
from privpart.example_level.gradients import WatchedModule
from privpart.example_level.optimizer import FTRLOptimizer
from privpart.model import same_bits

_MODULE, _OPTIMIZER = "module_state_dict", "optimizer_state_dict"
_ABOUT = "privacy_accountant_state_dict"


@dataclass(slots=True)
class Checkpoints:
    """Writes and reads the checkpoints of a run; without one, only reads weights.

    ``is_loaded`` is whether weights of a run were loaded before this engine has one.
    """

    module: WatchedModule | None = None
    optimizer: FTRLOptimizer | None = None
    plan: str = ""
    run_id: str = ""
    is_loaded: bool = False
    first: int = field(init=False)

    def __post_init__(self) -> None:
        self.first = 0 if self.optimizer is None else self.optimizer.passes.done

    def save(
        self,
        path: Any,  # noqa: ANN401
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        values: dict[str, Any],
        of_module: dict[str, Any],
        of_torch: dict[str, Any],
    ) -> None:
        """Write a checkpoint."""
        private = self.optimizer
        if private is None or not self._is_own(module) or optimizer not in (None, private):
            raise ConfigError("module, optimizer: pass those that make_private returned.")
        private.refuse_halted()
        values[_MODULE] = _inner(module).state_dict(**of_module)
        values[_ABOUT] = {"run": self.run_id, "plan": self.plan, "steps": private.passes.done}
        if optimizer is not None:
            values[_OPTIMIZER] = private.state_dict()
        torch.save(values, path, **of_torch)

    def load(
        self,
        path: Any,  # noqa: ANN401
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        of_module: dict[str, Any],
        of_torch: dict[str, Any],
    ) -> dict[str, Any]:
        """Return the values of a checkpoint, and load its weights where that takes no step back."""
        values = _read(path, of_torch)
        about = values[_ABOUT]
        private = self.optimizer
        if optimizer is not None and optimizer is not private:
            raise ConfigError(
                "optimizer: is not the one that make_private returned. To continue a run, call "
                "make_private(out=..., resume=True) first; for the weights alone, leave it out."
            )
        values.pop(_OPTIMIZER, None)
        if private is None or not self._is_own(module):
            self.is_loaded = private is None
            _inner(module).load_state_dict(values[_MODULE], **of_module)
            return values
        if about["run"] != self.run_id:
            raise ConfigError(
                f"{path}: is of another run. Continue that one by make_private(out=..., "
                "resume=True) with its folder; a new run begins with public weights."
            )
        self._compare(path, values, about["steps"], private, module, of_module)
        return values

    def _compare(
        self,
        path: object,
        values: dict[str, Any],
        steps: int,
        private: FTRLOptimizer,
        module: nn.Module,
        of_module: dict[str, Any],
    ) -> None:
        """Load into the module of the run what takes no step back."""
        done = private.passes.done
        if steps > done:
            raise ConfigError(
                f"{path}: is of step {steps}, and the run is at {done}: its folder is an older "
                "copy, or not the one. Its noise would come twice; restore the newest copy."
            )
        if steps == done:
            state = _inner(module).state_dict()
            if any(not same_bits(state[name], t) for name, t in values[_MODULE].items()):
                raise ConfigError(f"{path}: its weights are not those of step {done} of this run.")
        elif private.passes.is_done:
            _inner(module).load_state_dict(values[_MODULE], **of_module)
        elif done == self.first:
            private.passes.loop_is_at(steps)
            sys.stderr.write(
                f"privpart: {path} is of step {steps}; the run's folder is at step {done}, from "
                "which it continues: a step that was released is not taken again.\n"
            )
        else:
            raise ConfigError(
                f"{path}: is of step {steps}, and this run is at {done}. Going back would take "
                "steps twice, at twice their cost. Load it into another module, or when all steps "
                "are done."
            )

    def _is_own(self, module: nn.Module) -> bool:
        return self.module is not None and _inner(module) is _inner(self.module)


def _inner(module: nn.Module) -> nn.Module:
    """Return the user's own module, whose names have no prefix."""
    return module.get_submodule("_module") if isinstance(module, WatchedModule) else module


def refuse_schedulers(noise: object, clip: object) -> None:
    """Refuse what changes noise or clip norm during a run."""
    for name, value in (("noise_scheduler", noise), ("grad_clip_scheduler", clip)):
        if value is not None:
            raise ConfigError(
                f"{name}: noise and clip norm are planned for all steps before the first. Leave it "
                "out."
            )


def _read(path: Any, of_torch: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    if not of_torch.get("weights_only", True):
        raise ConfigError(
            "torch_load_kwargs: weights_only=False runs code from the file. Leave it out, and keep "
            "plain values in checkpoint_dict."
        )
    try:
        values: dict[str, Any] = torch.load(path, **{**of_torch, "weights_only": True})
    except (pickle.UnpicklingError, EOFError, RuntimeError, OSError) as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigError(f"{path}: cannot be read as a checkpoint: {why}.") from None
    about = values.get(_ABOUT) if isinstance(values, dict) else None
    if not isinstance(about, dict) or not {"run", "steps"} <= about.keys() or _MODULE not in values:
        raise ConfigError(
            f"{path}: was not written by FTRLEngine.save_checkpoint, so nothing says what its "
            "weights cost. Load weights that are public by module.load_state_dict."
        )
    return values
