"""Fit cache: the same fit once, and no fit from a damaged file."""

import json
import os
from pathlib import Path

import pytest

from accounting import BandedInverse, BufferedToeplitz, Participation, Toeplitz
from accounting.mechanisms import banded_inverse, buffered_toeplitz, toeplitz

RUN = Participation(40, 2, 10)
FITS = [
    (BufferedToeplitz, buffered_toeplitz, "fit_blt", {"buffers": 2}),
    (Toeplitz, toeplitz, "fit_toeplitz", {"bands": 3, "fit": True}),
    (BandedInverse, banded_inverse, "fit_banded_inverse", {"bands": 3, "fit": True}),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVPART_CACHE_DIR", str(tmp_path))
    return tmp_path / "fits"


@pytest.mark.parametrize(("kind", "module", "fit", "options"), FITS)
def test_a_fit_is_made_once(folder, monkeypatch, kind, module, fit, options):
    first = kind.from_options(RUN, **options)
    (file,) = folder.iterdir()
    monkeypatch.setattr(module, fit, lambda *_: pytest.fail("fitted again"))
    assert kind.from_options(RUN, **options) == first
    assert json.loads(file.read_text())["value"] == first.to_dict()
    monkeypatch.undo()
    monkeypatch.setenv("PRIVPART_CACHE_DIR", str(folder.parent))
    assert kind.from_options(Participation(40, 2, 11), **options) is not None
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
    first = BufferedToeplitz.from_options(RUN, buffers=2)
    (file,) = folder.iterdir()
    good = file.read_text()
    file.write_text(damage(good))
    assert BufferedToeplitz.from_options(RUN, buffers=2) == first
    assert file.read_text() == good


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVPART_CACHE_DIR", "/proc/nowhere")
    assert BufferedToeplitz.from_options(RUN, buffers=2).rounds == 40


def test_a_file_in_place_of_the_folder_costs_time_only(tmp_path, monkeypatch):
    taken = tmp_path / "taken"
    taken.touch()
    monkeypatch.setenv("PRIVPART_CACHE_DIR", str(taken))
    assert BufferedToeplitz.from_options(RUN, buffers=2).rounds == 40
    assert Path(taken).read_bytes() == b""
