"""Keywords of Opacus's PrivacyEngine that have one meaning here, and arguments of other kinds.

A keyword is accepted where its value means what ``FTRLEngine`` does anyway. For any other value it
has a sentence: what was passed, what is allowed, and what to do.
"""

from collections.abc import Mapping
from difflib import get_close_matches

import torch
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from accounting.checks import ConfigError
from privpart.model import refuse_batch_statistics

_ADAPTIVE = "is of clipping='adaptive', whose clip norm follows the data; leave it out."
_MEANINGS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "clipping": (
        ("flat",),
        "Each example is clipped over all trained parameters jointly, which is 'flat'; no "
        "accounting here is for clip norms by layer, or such as follow the data. Leave it out.",
    ),
    "noise_generator": (
        (None,),
        "Noise comes from a key of the operating system. Leave it out; for a simulation that can "
        "be repeated, and is not private, FTRLEngine(seed=0).",
    ),
    "criterion": (
        (None,),
        "Only ghost clipping takes a loss, and it is not offered; call the loss in the loop, and "
        "leave it out.",
    ),
    "wrap_model": (
        (True,),
        "The module that is returned compares what it is called with with what was dealt; call it "
        "in the loop, and leave this out.",
    ),
    "rand_on_empty": (
        (False,),
        "A batch of nobody never reaches the loop: its step is noise alone. Leave it out.",
    ),
    "max_clipbound": ((), _ADAPTIVE),
    "min_clipbound": ((), _ADAPTIVE),
    "clipbound_learning_rate": ((), _ADAPTIVE),
    "target_unclipped_quantile": ((), _ADAPTIVE),
    "unclipped_num_std": ((), _ADAPTIVE),
    "alphas": ((), "is of Opacus's accountant 'rdp'; epsilon here needs no orders. Leave it out."),
    "epsilon_tolerance": ((), "is of Opacus's search; the noise is within 1e-4. Leave it out."),
}
_MODES = {
    "ghost": "it sums within a backward pass, in floating point, where nobody bounds what an "
    "example adds. For less memory, use BatchMemoryManager",
    "ew": "ExpandedWeights go past the hooks that take each gradient for the optimizer alone",
    "no_op": "somebody else would compute the gradients of each example, which nothing checks",
}


def refuse_keywords(passed: Mapping[str, object], known: Mapping[str, object]) -> None:
    """Refuse Opacus's keywords with a value that is not offered; ``known`` are the accepted ones.

    Raises:
        ConfigError: such a value, or no keyword of either.
    """
    for name, value in passed.items():
        if name not in _MEANINGS:
            near = get_close_matches(name, [*known, *_MEANINGS], 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{name}: make_private has no such keyword.{hint}")
        allowed, why = _MEANINGS[name]
        if not allowed:
            raise ConfigError(f"{name}={_shown(value)}: {why}")
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise ConfigError(f"{name}={_shown(value)}: must be {allowed[0]!r}. {why}")


def refuse_mode(mode: object) -> None:
    """Refuse a way to compute per-example gradients that keeps none for the optimizer alone."""
    if mode in ("hooks", "functorch"):
        return
    name = str(mode).removesuffix("_fsdp").removesuffix("_tp")
    why = f" Not {mode!r}: {_MODES[name]}." if name in _MODES else ""
    raise ConfigError(f"grad_sample_mode={_shown(mode)}: must be 'hooks' or 'functorch'.{why}")


def refuse_switch(name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if type(value) is not bool:
        raise ConfigError(f"{name}={_shown(value)}: must be True or False.")


def refuse_constructor(accountant: object, secure_mode: object, *, seeded: bool) -> None:
    """Refuse arguments of the constructor that mean something else here."""
    refuse_switch("secure_mode", secure_mode)
    if secure_mode and seeded:
        raise ConfigError(
            "seed: noise from a seed is not secure, and secure_mode=True asks for that. Leave one "
            "of them out."
        )
    if accountant not in ("prv", "gdp"):
        looser = " 'rdp' is looser." if accountant == "rdp" else ""
        raise ConfigError(
            f"accountant={_shown(accountant)}: must be 'prv', or 'gdp' for fixed passes.{looser} "
            "Epsilon is exact of fixed passes, and by privacy-loss distributions of Poisson "
            "samples. Leave it out."
        )


def refuse_sampling(sampling: object, accountant: str, order_seed: object) -> None:
    """Refuse what does not go with the way in which examples are dealt."""
    refuse_switch("poisson_sampling", sampling)
    if sampling and accountant == "gdp":
        raise ConfigError(
            "accountant='gdp': is exact of fixed passes, and no upper bound with "
            "poisson_sampling=True. Leave it out."
        )
    if sampling and order_seed is not None:
        raise ConfigError(
            "order_seed: is of fixed passes; the samples of poisson_sampling=True come from a "
            "secret key. Leave it out."
        )


def refuse_kinds(module: object, optimizer: object, loader: object) -> None:
    """Refuse a module, optimizer or loader of another kind, or one that is private already."""
    if isinstance(module, torch._dynamo.OptimizedModule):
        raise ConfigError(
            "module: is compiled (torch.compile), and Opacus's hooks do not run in compiled code. "
            "Pass the module itself; the one that make_private returns may be compiled."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError("module: is compiled (TorchScript), where no hooks run; pass the module.")
    if isinstance(module, DistributedDataParallel | nn.DataParallel):
        raise ConfigError(
            f"module: is in a {type(module).__name__}, which adds up gradients that are not "
            "clipped. Pass the module inside of it (module.module), or of several processes "
            "Opacus's DifferentiallyPrivateDistributedDataParallel."
        )
    kinds: tuple[tuple[str, object, type, str], ...] = (
        ("module", module, nn.Module, "a torch.nn.Module"),
        ("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim optimizer of its weights"),
        ("data_loader", loader, DataLoader, "a torch.utils.data.DataLoader with a batch_size"),
    )
    for name, value, kind, wanted in kinds:
        if not isinstance(value, kind):
            made = " that was called" if isinstance(value, type) else ""
            raise ConfigError(f"{name}={_shown(value)}: must be {wanted}{made}.")
    if isinstance(optimizer, DPOptimizer):
        raise ConfigError("optimizer: is private already. Pass the one that it was made from.")


def refuse_layers(module: nn.Module) -> None:
    """Refuse layers of which there are no per-example gradients; say what takes their place."""
    refuse_batch_statistics(module)
    for name, layer in module.named_modules():
        check = ModuleValidator.VALIDATORS.get(type(layer))
        if not any(p.requires_grad for p in layer.parameters()) or check is None:
            continue
        if not (faults := check(layer)):
            continue
        why = " ".join(str(faults[0]).split())
        if type(layer) in ModuleValidator.FIXERS:
            why = (
                "Opacus has no per-example gradients of it. FTRLEngine.get_compatible_module("
                f"module) returns the module with a {_replacement(layer)} of the same weights in "
                "its place; make the optimizer from the parameters of that one"
            )
        raise ConfigError(f"layer {name!r} is a {type(layer).__name__}: {why.rstrip('.')}.")


def _replacement(layer: nn.Module) -> str:
    return type(ModuleValidator.FIXERS[type(layer)](layer)).__name__


def _shown(value: object) -> str:
    """Return a short text of a value; a network's may have many lines, and data."""
    simple = value is None or isinstance(value, str | int | float | bool)
    return repr(value)[:60] if simple else f"<{getattr(value, '__name__', type(value).__name__)}>"
