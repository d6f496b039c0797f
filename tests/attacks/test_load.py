"""Updates from files, Opacus and Flower: by name, and never cut to fit."""

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from accounting import ConfigError
from attacks import Observation, dlg, from_arrays, gradients_of, observe, psnr, read_update
from attacks.update import double_state


def observed(model, update, labels, **options):
    return Observation(
        update, double_state(model), (1, 1, 8, 8), labels, training=model.training, **options
    )


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_file_of_an_opacus_model_is_attacked(lenet, digits, tmp_path):
    x, y = digits[0][:1], digits[1][:1]
    wrapped = GradSampleModule(lenet)
    cross_entropy(wrapped(x.float()), y).backward()
    save_file({n: p.grad for n, p in wrapped.named_parameters()}, tmp_path / "u.safetensors")
    update = read_update(tmp_path / "u.safetensors")
    assert set(update) == set(double_state(lenet))
    assert set(gradients_of(wrapped)) == set(update)
    wrapped.remove_hooks()
    found = dlg(lenet, observed(lenet, update, y), restarts=1, newton_steps=0)
    assert float(psnr(found.x, x)) > 30  # float32


def test_the_arrays_of_a_flower_client(lenet, digits):
    x, y = digits[0][:1], digits[1][:1]
    before = [value.numpy().copy() for value in lenet.state_dict().values()]
    delta = observe(lenet, x, y).update
    after = [b - 0.1 * delta[n].numpy() for n, b in zip(lenet.state_dict(), before, strict=True)]
    update = from_arrays(lenet, after, before)
    for name, value in update.items():
        assert np.allclose(value.numpy(), -0.1 * delta[name].numpy(), atol=1e-7)


def test_buffers_do_not_ride_along(digits):
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    arrays = [value.numpy() for value in model.state_dict().values()]
    assert set(from_arrays(model, arrays)) == {name for name, _ in model.named_parameters()}


def test_a_list_that_is_short_or_out_of_order_is_an_error(lenet):
    arrays = [value.numpy() for value in lenet.state_dict().values()]
    for bad in (arrays[:-1], arrays[2:], [*arrays, arrays[0]], arrays[::-1]):
        with pytest.raises(ConfigError):
            from_arrays(lenet, bad)
        with pytest.raises(ConfigError):
            from_arrays(lenet, arrays, bad)


def test_a_file_is_read_in_one_order(lenet, tmp_path):
    """The reader of the format returns names in random order, which changes sums and hashes."""
    save_file(dict(lenet.state_dict()), tmp_path / "update.safetensors")
    for _ in range(5):
        names = list(read_update(tmp_path / "update.safetensors"))
        assert names == sorted(lenet.state_dict())


def test_what_is_no_update(lenet, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_update(tmp_path / "none.safetensors")
    (tmp_path / "bad").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ConfigError, match=r"not a valid \.safetensors file"):
        read_update(tmp_path / "bad")
    with pytest.raises(ConfigError, match="backward"):
        gradients_of(lenet)
