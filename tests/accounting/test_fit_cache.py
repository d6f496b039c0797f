"""Fit cache: the same fit once, and no fit from a damaged file."""

import json

import pytest

from accounting import Participation, fit_cache
from accounting.mechanisms import MechanismChoice

RUN = Participation(40, 2, 10)
BLT = MechanismChoice.parse("blt:buffers=2")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVPART_CACHE_DIR", str(tmp_path))
    return tmp_path / "fits"


@pytest.mark.parametrize("text", ["blt:buffers=2", "bandmf:bands=3", "banded-inverse:bands=3,fit"])
def test_a_fit_is_made_once(folder, monkeypatch, text):
    choice = MechanismChoice.parse(text)
    first = choice.build(RUN)
    (file,) = folder.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(fit_cache, "write_cached", lambda *_: pytest.fail("fitted again"))
        assert choice.build(RUN) == first
    assert json.loads(file.read_text())["value"] == first.to_dict()
    assert choice.build(Participation(40, 2, 11)).rounds == 40
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "[" * 100_000,
        lambda text: text.replace("40", "41"),
        lambda text: text.replace('"decay": [', '"decay": [NaN, '),
        lambda text: text.replace('"scale"', '"scales"'),
        lambda text: json.dumps([text]),
        lambda text: json.dumps(json.loads(text) | {"value": None}),
    ],
)
def test_a_damaged_file_is_fitted_again(folder, damage):
    first = BLT.build(RUN)
    (file,) = folder.iterdir()
    good = file.read_text()
    file.write_text(damage(good))
    assert BLT.build(RUN) == first
    assert file.read_text() == good


def test_a_file_in_place_of_the_folder_costs_time_only(tmp_path, monkeypatch):
    taken = tmp_path / "taken"
    taken.touch()
    monkeypatch.setenv("PRIVPART_CACHE_DIR", str(taken))
    assert BLT.build(RUN).rounds == 40
    assert taken.read_bytes() == b""
