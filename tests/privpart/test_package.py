"""The code that made a run: a release's, modified or unknown, and what a report then says."""

import base64
import hashlib
from importlib import metadata
from types import SimpleNamespace

import pytest
import runs

from accounting import ConfigError
from privpart.run import package
from privpart.run.begin import create_run
from privpart.run.evidence import gather
from privpart.run.folder import RunFolder
from privpart.run.ledger import Ledger, SigningKey
from privpart.run.report import run_report

ONE, TWO = "1" * 64, "2" * 64


@pytest.mark.parametrize(
    ("named", "version", "here", "word"),
    [
        ({"files": ONE, "wheel": ONE}, "9", ONE, "release"),
        ({"files": ONE, "wheel": None}, "9", ONE, "release"),
        ({"files": ONE, "wheel": TWO}, "9", None, "modified"),
        ({"files": ONE, "wheel": TWO}, "8", ONE, "modified"),
        ({"files": ONE, "wheel": ONE}, "9", TWO, "modified"),
        ({"files": ONE, "wheel": ONE}, "8", TWO, "unknown"),
        ({"files": ONE, "wheel": None}, "9", None, "unknown"),
        ({"files": None, "wheel": None}, "9", ONE, "modified"),
        (None, "9", ONE, "unknown"),
    ],
)
def test_the_word_follows_from_both_lists(monkeypatch, named, version, here, word):
    monkeypatch.setattr(package, "recorded", lambda: here)
    monkeypatch.setattr(package, "installed_version", lambda: "9")
    assert package.identity(named, version)[0] == word


def test_the_list_of_a_wheel_and_the_files_on_the_disk_have_one_hash(monkeypatch):
    root = package.Path(package.__file__).parents[2]
    names = [f for p in ("accounting", "attacks", "privpart") for f in (root / p).rglob("*.py")]

    def listed(file):
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest())
        path = metadata.PackagePath(file.relative_to(root).as_posix())
        path.hash = SimpleNamespace(mode="sha256", value=digest.decode().rstrip("="))
        return path

    other = metadata.PackagePath("privpart-0.1.0.dist-info/RECORD")
    other.hash = None
    monkeypatch.setattr(metadata, "files", lambda name: [other, *map(listed, reversed(names))])
    assert package.recorded.__wrapped__() == package.running.__wrapped__()
    assert package.tree_hash([("a", ONE)]) != package.tree_hash([("b", ONE)])


def test_a_run_that_other_code_continued_is_worth_what_the_worst_of_it_is(monkeypatch, tmp_path):
    folder, sound = tmp_path / "run", {"files": ONE, "wheel": ONE}
    for until, named in ((1, sound), (2, {"files": TWO, "wheel": ONE}), (3, sound)):
        monkeypatch.setattr(package, "facts", lambda named=named: named)
        opened = create_run(folder, runs.PLAN, facts=runs.FACTS) if until == 1 else None
        with opened or RunFolder.open(folder) as run:
            runs.train(run, until)
        evidence = gather(folder)
        assert evidence.package == ("unknown" if until == 1 else "modified")
        assert len(evidence.facts.get(package.PACKAGES, ())) == (until > 1)
    found = {a.code: a.status for a in run_report(folder).guarantee.assumptions}
    assert "enforced" not in found.values()
    assert "made by 2 versions of the code" in evidence.line("package").says


@pytest.mark.parametrize(
    "odd",
    [{"package": [1]}, {"package": "x"}, {"versions": None}, {"packages": 5}, {"packages": [5]}],
    ids=str,
)
def test_odd_facts_on_the_code_are_one_sentence(tmp_path, odd):
    create_run(tmp_path / "run", runs.PLAN, facts=runs.FACTS).close()
    facts = Ledger(tmp_path / "run").facts | odd
    signer = SigningKey((tmp_path / "run" / "signing-key").read_bytes())
    Ledger.create(tmp_path / "run", facts, signer)
    for reads in (lambda path: RunFolder.open(path, adopt=True), gather):
        with pytest.raises(ConfigError):
            reads(tmp_path / "run")


def test_nothing_is_enforced_by_code_that_was_modified(monkeypatch, tmp_path):
    def words(named):
        monkeypatch.setattr(package, "facts", lambda: named)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        with create_run(folder, runs.PLAN, facts=runs.FACTS) as run:
            runs.train(run, 2)
        return {a.code: a.status for a in run_report(folder).guarantee.assumptions}

    sound = words({"files": ONE, "wheel": ONE})
    assert "enforced" in sound.values()
    modified = words({"files": ONE, "wheel": TWO})
    assert "enforced" not in modified.values()
    assert {code for code in sound if sound[code] != modified[code]} == {
        code for code, status in sound.items() if status == "enforced"
    }
