"""A pretend accelerator: CPU tensors that say they are elsewhere, and refuse to meet CPU tensors.

torch keeps PrivateUse1 for devices from outside. Here it is a tensor subclass around a CPU tensor
(https://github.com/albanD/subclass_zoo/blob/main/new_device.py has the idea): every operation runs
on the CPU, and raises where CUDA would because tensors are on two devices. It registers itself for
the whole process, so test_device.py runs its tests in a process of their own.

Where pretending ends: torch 2.13 aborts a process whose autograd wants a stream of a device that is
written in Python, which happened in GroupNorm's gradient inside ``torch.func.vmap(grad(...))``.
"""

from contextlib import nullcontext

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

aten = torch.ops.aten
NAME = "pretend"
BETWEEN_DEVICES = {aten.copy_.default, aten._to_copy.default}
INDEXED = {aten.index.Tensor: (0,), aten.index_put_.default: (0, 2)}
"""Operations whose indices may be on the CPU; the places of what may not."""


class Namespace(backend_registration._DummyBackendModule):
    """``torch.pretend``: what the engine asks ``torch.cuda`` for. The CPU's generator draws."""

    def __init__(self):
        self.seeds, self.state = [], torch.zeros((), dtype=torch.int64)

    def synchronize(self, device):
        assert torch.device(device).type == NAME

    def manual_seed(self, seed):
        self.seeds.append(seed)
        self.state = torch.tensor(seed)

    def device(self, device):
        return nullcontext()

    def mem_get_info(self, device):
        return 2**30, 2**31

    def get_rng_state(self, device):
        return self.state

    def set_rng_state(self, state, device):
        self.state = state

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


namespace = Namespace()
backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=namespace)
# autocast rounds nothing here, but may be asked whether it is on
_autocast = torch.library.Library("_", "IMPL")
_autocast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


class PretendTensor(torch.Tensor):
    """``inner`` has the numbers."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.inner = inner
        return made

    def data_ptr(self):
        return self.inner.data_ptr()

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, other):  # torch's own would not follow ``inner``
        self.inner = other.inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return _run(operation, args, kwargs or {})


class Pretend(TorchDispatchMode):
    """In this context tensors can be made on the device, and moved to it."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # to skip what torch's compiler does, torch would import it: seconds

    def __enter__(self):
        # autograd's thread for a device needs more of it than this: it would abort the process
        self._threads = torch.autograd.grad_mode.set_multithreading_enabled(False)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._threads.__exit__(*error)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return _run(operation, args, kwargs or {})


def _refuse_two_devices(operation, args, leaves):
    if operation in INDEXED:
        if not isinstance(args[0], PretendTensor) and any(
            isinstance(t, PretendTensor) for t in leaves
        ):
            raise RuntimeError(f"{operation}: indices are on device {NAME}, and the tensor on cpu")
        leaves = tree_leaves([args[k] for k in INDEXED[operation]])
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    # a number that is a tensor may be on the CPU
    kinds = {
        isinstance(t, PretendTensor) for t in tensors if isinstance(t, PretendTensor) or t.dim()
    }
    if len(kinds) > 1 and operation not in BETWEEN_DEVICES:
        raise RuntimeError(f"{operation}: tensors are on two devices, cpu and {NAME}")


def _run(operation, args, kwargs):
    leaves, shape = tree_flatten((args, kwargs))
    mine = [t for t in leaves if isinstance(t, PretendTensor)]
    _refuse_two_devices(operation, args, leaves)
    here = bool(mine)
    if kwargs.get("device") is not None:
        here = torch.device(kwargs["device"]).type == NAME
    elif operation is aten.copy_.default:
        here = isinstance(args[0], PretendTensor)
    wrapped = {id(t.inner): t for t in mine}
    args, kwargs = tree_unflatten(
        [t.inner if isinstance(t, PretendTensor) else t for t in leaves], shape
    )
    if kwargs.get("device") is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}

    def outer(t):
        if not here or not isinstance(t, torch.Tensor):
            return t
        return wrapped[id(t)] if id(t) in wrapped else PretendTensor(t)

    found = operation(*args, **kwargs)
    return outer(found) if isinstance(found, torch.Tensor) else tree_map(outer, found)
