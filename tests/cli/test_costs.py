"""``privpart costs``: full beside partial, in every form, and the picture."""

import csv
import io
import json

import pytest


def test_the_ladder_is_the_default_and_partial_costs_less(privpart):
    full, partial = json.loads(privpart("costs", "emnist-cnn", "--format", "json").stdout)["rows"]
    assert (full["part"], partial["part"]) == ("full", "freeze-dense1")
    assert full["trained"] == full["numbers"] == 1_690_174
    assert partial["trained"] == 84_030
    assert round(partial["reduction"]) == 20
    assert partial["seconds_up"] == pytest.approx(4 * 84_030 / 0.25e6, rel=1e-3)
    assert partial["seconds_down"] == pytest.approx(partial["seconds_up"] / 3, rel=1e-3)
    assert partial["forward_flops"] == full["forward_flops"]
    assert partial["backward_flops"] < full["backward_flops"]
    assert partial["memory_bytes"] < full["memory_bytes"] / 2
    for row in (full, partial):
        kinds = ("parameters", "gradients", "before", "optimizer", "activations")
        assert row["memory_bytes"] == sum(row[f"{kind}_bytes"] for kind in kinds)


def test_own_patterns_and_csv(privpart):
    done = privpart(
        *("costs", "small_cnn", "--train", "dense2.*", "--train", "norm.*"),
        *("--format", "csv"),
    )
    assert done.returncode == 0, done.stderr
    full, partial = csv.DictReader(io.StringIO(done.stdout))
    assert partial["part"] == "dense2.* norm.*"
    assert int(partial["trained"]) == 512 * 10 + 10 + 2 * 32
    assert int(full["bytes_up"]) > 10 * int(partial["bytes_up"])
