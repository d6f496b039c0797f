"""The wheel: exactly three top-level packages, typed, and it runs without the source tree."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BUDGET = ["epsilon", "--rounds", "1600", "--noise-multiplier", "1.13", "--delta", "1e-6"]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Return a copy of what a build reads, in a folder named as `git clone` names it."""
    source = tmp_path_factory.mktemp("source") / "privpart"
    source.mkdir()
    for part in ("pyproject.toml", "README.md", "LICENSE", "privpart", "accounting", "attacks"):
        subprocess.run(["cp", "-r", ROOT / part, source / part], check=True)
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", folder, source]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_it_has_exactly_three_packages_that_are_typed_and_answers_alone(wheel, tmp_path):
    """Unpacked on a path of its own, with this environment's dependencies."""
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {"accounting", "attacks", "privpart"}
    assert {f"{package}/py.typed" for package in top} <= set(names)
    assert {"privpart/study/plans/digits.toml", "privpart/cli/pages/page.html"} <= set(names)
    assert not [name for name in names if "test" in name or "__pycache__" in name]

    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys, accounting, privpart, attacks; from privpart.cli.main import main;"
        f"assert all(m.__file__.startswith({str(tmp_path)!r}) for m in (accounting, privpart,"
        "attacks)); main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *BUDGET, "--format", "json"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert round(json.loads(done.stdout)["epsilon"], 3) == 17.667


def test_a_run_names_its_code_as_a_release_modified_or_unknown(
    wheel, tmp_path, monkeypatch, capsys
):
    """By the list that pip installs with a wheel; a byte of one file is then edited."""
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    code = (
        "import sys; from accounting import Independent, Participation;"
        "from privpart import PrivacyPlan; from privpart.run.begin import create_run;"
        "from privpart.run.evidence import gather;"
        "plan = PrivacyPlan(mechanism=Independent(2), participation=Participation(2),"
        "clip_norm=1.0, report_goal=1, noise_multiplier=1.0);"
        "begun, *checked = sys.argv[1:];"
        "begun and create_run(begun, plan, facts={'delta': 1e-6}).close();"
        "print(*(gather(run).line('package').says for run in checked), sep='\\n')"
    )

    def says(path: Path, *runs: str) -> list[str]:
        """Begin the first run with the code of a path, and return what it says of the others."""
        if path == ROOT:  # which this process has imported
            monkeypatch.setattr(sys, "argv", ["", *runs])
            exec(code, {})
            return capsys.readouterr().out.splitlines()
        done = subprocess.run(
            [sys.executable, "-c", code, *runs],
            env=os.environ | {"PYTHONPATH": str(path)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    (checkout,) = says(ROOT, "checkout", "checkout")
    assert "a source checkout, which is no release" in checkout
    sound, checkout = says(site, "sound", "sound", "checkout")
    assert sound.startswith("release: files ")
    assert checkout.startswith("release: files ")  # the wheel was built from these files
    edited = site / "privpart" / "clip.py"
    edited.write_bytes(edited.read_bytes().replace(b"Clip", b"Clap", 1))
    assert says(site, "edited", "edited")[0].startswith("modified: ")
    sound, edited = says(ROOT, "", "sound", "edited")
    assert "of their wheel; compare" in sound
    assert edited.startswith("modified: ")


@pytest.mark.slow
def test_wheel_and_sdist_are_fit_for_an_index(source, wheel, tmp_path):
    """Their metadata render, and a wheel that is built from the sdist holds the same files."""
    pytest.importorskip("twine", reason="make wheel-check installs it")
    command = [sys.executable, "-m", "build", "--sdist", "--outdir", tmp_path, source]
    subprocess.run(command, check=True, capture_output=True)
    sdist = next(tmp_path.glob("*.tar.gz"))
    for check in (
        ["twine", "check", "--strict", wheel, sdist],
        ["check_wheel_contents", "--toplevel", "accounting,attacks,privpart", wheel],
    ):
        done = subprocess.run([sys.executable, "-m", *check], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    shutil.unpack_archive(sdist, tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, unpacked]
    subprocess.run(command, check=True, capture_output=True)
    again = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert sorted(again) == sorted(zipfile.ZipFile(wheel).namelist())
    assert zipfile.ZipFile(wheel).testzip() is None


@pytest.mark.slow
def test_a_clean_environment_installs_and_runs_it(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    constraints = ROOT / "constraints.txt"
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", constraints, wheel], check=True)
    done = subprocess.run(
        [tmp_path / "env" / "bin" / "privpart", *BUDGET, "--format", "json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert round(json.loads(done.stdout)["epsilon"], 3) == 17.667
