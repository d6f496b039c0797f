"""The wheel: exactly three top-level packages, typed, and it runs without the source tree."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

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
    code = """
from pathlib import Path
from accounting import Independent, Participation
from privpart import PrivacyPlan, clip
from privpart.run import package
from privpart.run.begin import create_run
from privpart.run.evidence import gather

plan = PrivacyPlan(mechanism=Independent(2), participation=Participation(2), clip_norm=1.0,
                   report_goal=1, noise_multiplier=1.0)

def says(begun, *checked):
    if begun:
        create_run(begun, plan, facts={"delta": 1e-6}).close()
    print(*(gather(run).line("package").says for run in checked), sep="\\n")
"""
    here: dict[str, Any] = {}
    exec(code, here)  # of the checkout, which this process has imported
    here["says"]("checkout", "checkout")
    assert "a source checkout, which is no release" in capsys.readouterr().out

    steps = """
says("sound", "sound", "checkout")
edited = Path(clip.__file__)
edited.write_bytes(edited.read_bytes().replace(b"Clip", b"Clap", 1))
package.running.cache_clear()  # as in a new process
says("edited", "edited")
"""
    done = subprocess.run(
        [sys.executable, "-c", code + steps],
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    sound, checkout, edited = done.stdout.splitlines()
    assert sound.startswith("release: files ")
    assert checkout.startswith("release: files ")  # the wheel was built from these files
    assert edited.startswith("modified: ")
    here["says"]("", "sound", "edited")
    sound, edited = capsys.readouterr().out.splitlines()
    assert "of their wheel; compare" in sound
    assert edited.startswith("modified: ")


@pytest.mark.parametrize("name", ["accounting", "attacks"])
@pytest.mark.parametrize("place", ["earlier on the path", "over ours"])
def test_another_package_in_the_place_of_ours_is_named_at_import(tmp_path, name, place):
    """Names that common collide: somebody's own folder, or another distribution."""
    site = tmp_path / "site"
    for package in ("accounting", "attacks", "privpart"):
        (site / package).mkdir(parents=True)
        shutil.copy(ROOT / package / "__init__.py", site / package / "__init__.py")
    other = tmp_path / name if place == "earlier on the path" else site / name
    other.mkdir(exist_ok=True)
    (other / "__init__.py").write_text("BOOKS = []")
    command = [sys.executable, "-c", "import privpart"]
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{site}"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"ImportError: {name} is found at {other / '__init__.py'}: another" in done.stderr
    shutil.copy(ROOT / name / "__init__.py", site / name / "__init__.py")
    if other.parent == tmp_path:
        shutil.rmtree(other)
    subprocess.run(command, env=env, cwd=tmp_path, check=True)


def test_without_torch_an_epsilon_is_computed_and_a_run_says_what_is_missing(tmp_path):
    """All in one process: to start is most of what a command costs."""
    cases = (
        ([*BUDGET, "--max-participations", "1"], 0, "17.667"),
        (["doctor"], 0, "torch"),
        (["report", str(tmp_path)], 7, "this command needs torch, which was left out"),
    )
    code = (
        "import sys; sys.modules |= dict.fromkeys(['torch', 'opacus', 'matplotlib', 'jinja2',"
        "'sklearn', 'filelock', 'cryptography', 'safetensors'])\n"
        "from privpart.cli.main import main\nsys.stderr = sys.stdout\n"
        f"for words in {[words for words, _, _ in cases]}:\n"
        "    sys.argv = ['privpart', *words]\n"
        "    try:\n        main()\n"
        "    except SystemExit as ended:\n        print('ENDED', ended.code or 0, flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    parts = re.split(r"ENDED (\d)\n", done.stdout)
    assert len(parts) == 2 * len(cases) + 1, done.stdout + done.stderr
    for (_, rc, said), output, status in zip(cases, parts[::2], parts[1::2], strict=False):
        assert (int(status), said in output) == (rc, True), output


def test_the_indexs_readme_has_no_relative_link_and_the_clones_has_no_other(wheel):
    with zipfile.ZipFile(wheel) as files:
        metadata = files.read("privpart-0.1.0.dist-info/METADATA").decode()
    assert "Author: The privpart authors" in metadata
    assert metadata.count("\nProject-URL: ") >= 3
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert len(links) > 20
    for link in links:
        if not link.startswith(("https:", "#")):
            assert (ROOT / link.partition("#")[0]).exists()
            assert re.search(rf"\]\(https://[^)]+/v0\.1\.0/{re.escape(link)}\)", metadata), link
    shown = re.findall(r"\]\(([^)]+)\)", metadata)
    assert [link for link in shown if not link.startswith(("https:", "#"))] == []
    assert len(shown) == len(links)


@pytest.mark.slow
def test_wheel_and_sdist_are_fit_for_an_index(source, wheel, tmp_path):
    """They render, are the same bytes when built again, and the sdist tests and builds itself."""
    pytest.importorskip("twine", reason="make wheel-check installs it")
    for part in ("tests", "docs", "examples", "benchmarks", "constraints.txt", "CHANGELOG.md",
                 "Makefile", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"):  # fmt: skip
        subprocess.run(["cp", "-r", ROOT / part, source / part], check=True)
    built = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        command = [sys.executable, "-m", "build", "--outdir", folder, source]
        subprocess.run(command, check=True, capture_output=True)
        built.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert built[0] == built[1]
    sdist = next((tmp_path / "one").glob("*.tar.gz"))
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
    assert next(tmp_path.glob("*.whl")).read_bytes() == wheel.read_bytes()
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_house.py",
               "tests/accounting/test_guarantee.py"]  # fmt: skip
    done = subprocess.run(command, cwd=unpacked, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(unpacked)})  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


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
