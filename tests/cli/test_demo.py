"""The demo, with one seed: three tables and three files."""

import json

import pytest

from privpart.cli import demo
from privpart.cli.demo import sweep_file
from privpart.study.sweep import sweep_of


@pytest.fixture(scope="module")
def finished(privpart, tmp_path_factory):
    """A demo of two noise levels and one image, whose trainings are those of the whole one."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    plan = tmp_path_factory.mktemp("plans") / "digits.toml"
    head, none, _, _, most = demo._PLAN.read_text().split("[joint.noise.")
    plan.write_text("[joint.noise.".join((head, none, most)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_PLAN", plan)
        patch.setattr(demo, "AUDITED_IMAGES", 1)
        patch.setattr(demo, "processes", lambda _: 1)
        return out, privpart("demo", "--out", str(out), "--seeds", "1")


@pytest.fixture(scope="module")
def report(finished):
    return json.loads((finished[0] / "report.json").read_text())


def test_both_parts_train_at_each_noise_with_a_rate_that_falls():
    cells = sweep_of(*sweep_file([5, 6])).cells
    seen = [(c.labels["part"], c.plan.privacy.noise_multiplier, c.seed) for c in cells]
    assert len(set(seen)) == len(cells) == 2 * 4 * 2
    for plan in (cell.plan for cell in cells):
        z = plan.privacy.noise_multiplier
        assert plan.server.learning_rate == pytest.approx(min(0.5, 0.3 / z if z else 0.5))


def test_tables_files_and_figures(finished, report):
    """One test of all that is shown, because each process would build the demo for its own."""
    out, done = finished
    assert done.returncode == 0, done.stderr
    for title in ("1. Budget", "2. Test accuracy", "3. Leakage by view"):
        assert title in done.stdout
    assert "What this does not show" in done.stdout
    # progress goes to stderr, in a log a line for each training and each update that is attacked
    lines = [line for line in done.stderr.split("\n") if line]
    assert [line[:9] for line in lines[:4]] == [f"{n} trained" for n in "1234"]
    assert (len(lines), lines[4]) == (10, "audit (conv net, full)")
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(files) == {"report.json", "accuracy.png", "leakage.png"}
    assert min(map(len, files.values())) > 5000
    assert all(files[name].startswith(b"\x89PNG") for name in ("accuracy.png", "leakage.png"))
    # no claim to be private
    assert report["noise_source"] == "seeded: not private"
    (budget,) = report["budget"]
    assert (budget["noise_multiplier"], budget["sensitivity_squared"]) == (3.0, 7)
    assert budget["status"] == "not-private"
    # accuracy falls with noise, and partial training sends less
    mean = {(a["part"], a["noise_multiplier"]): a["mean"] for a in report["accuracy"]}
    sent = {a["part"]: a["update_bytes"] for a in report["accuracy"]}
    for part in ("full", "partial"):
        assert mean[part, 0.0] > max(0.8, mean[part, 3.0] + 0.2)
    assert sent["full"] > 7 * sent["partial"]
    # the whole update is recovered, and every score has its baseline
    rows = {row["view"]: row for audit in report["leakage"].values() for row in audit["rows"]}
    assert min(rows["full"]["psnr_alone"]) > 30
    assert rows["first layer only"]["psnr_median"] > 140
    for row in rows.values():
        assert row["baseline_median"] > 5
        assert row["verdict"] in {"recovered", "partial", "ambiguous", "attack failed"}


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--seeds", "0"], "--seeds 0: must be at least 1"),
        (["--out", "/dev/null/out"], "cannot be made"),
    ],
)
def test_bad_input_fails_at_once(privpart, arguments, fault, tmp_path):
    done = privpart("demo", "--out", str(tmp_path), *arguments)
    assert done.returncode == 2
    assert fault in " ".join(done.stderr.split())
    assert not list(tmp_path.iterdir())
