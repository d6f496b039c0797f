"""``privpart costs``: full beside partial, in every form, and the picture."""

import csv
import io
import json
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def report(privpart):
    done = privpart("costs", "emnist-cnn", "--optimizer", "adam", "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_ladder_is_the_default_and_partial_costs_less(report):
    full, partial = report["rows"]
    assert (full["part"], partial["part"]) == ("full", "freeze-dense1")
    assert full["trained"] == full["numbers"] == 1_690_174
    assert partial["trained"] == 84_030
    assert round(partial["reduction"]) == 20
    assert partial["seconds_up"] == pytest.approx(4 * 84_030 / 0.25e6, rel=1e-3)
    assert partial["seconds_down"] == pytest.approx(partial["seconds_up"] / 3, rel=1e-3)
    assert partial["forward_flops"] == full["forward_flops"]
    assert partial["backward_flops"] < full["backward_flops"]
    assert partial["memory_bytes"] < full["memory_bytes"] / 2
    for row in report["rows"]:
        kinds = ("parameters", "gradients", "before", "optimizer", "activations")
        assert row["memory_bytes"] == sum(row[f"{kind}_bytes"] for kind in kinds)


def test_own_patterns_csv_and_picture(privpart, tmp_path):
    picture = tmp_path / "costs.png"
    done = privpart(
        *("costs", "small_cnn", "--train", "dense2.*", "--train", "norm.*"),
        *("--format", "csv", "--plot", str(picture), "--up", "1", "--down", "1"),
    )
    assert done.returncode == 0, done.stderr
    full, partial = csv.DictReader(io.StringIO(done.stdout))
    assert partial["part"] == "dense2.* norm.*"
    assert int(partial["trained"]) == 512 * 10 + 10 + 2 * 32
    assert float(partial["seconds_up"]) == pytest.approx(int(partial["bytes_up"]) / 1e6)
    assert int(full["bytes_up"]) > 10 * int(partial["bytes_up"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets a process's peak memory")
def test_measured_on_this_machine(privpart):
    done = privpart("costs", "bag-of-words", "--train", "*.bias", "--measure", "--format", "json")
    assert done.returncode == 0, done.stderr
    full, partial = json.loads(done.stdout)["rows"]
    # gradients, the values as received and the update: each as long as the model, or nothing
    assert full["measured_peak_bytes"] > partial["measured_peak_bytes"] + 2 * 20_000_000
    assert min(row["measured_step_seconds"] for row in (full, partial)) > 0
    assert "measuring *.bias" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "model 'nonsense' is unknown: must be one of small_cnn"),
        (["small_cnn", "--examples", "0"], "--examples 0"),
        (["small_cnn", "--batch-size", "0"], "--batch-size 0"),
        (["emnist_cnn", "--batch-size", "9" * 23], "must be at most 2147483648"),
        (["emnist_cnn", "--batch-size", "100000"], "must be at most 65536"),
        (["small_cnn", "--down", "nan"], "--down nan"),
        (["small_cnn", "--up", "-1"], "--up -1"),
        (["small_cnn", "--train", "dens3.*"], "dens3"),
        (["small_cnn", "--plot", "/nowhere/costs.png"], "--plot /nowhere/costs.png"),
        (["small_cnn", "--momentum", "0.5", "--optimizer", "adam"], "leave out --momentum"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message):
    from typer.testing import CliRunner

    from privpart.cli import main

    done = CliRunner().invoke(main.app, ["costs", *arguments])
    assert done.exit_code != 0
    assert message in main._as_option(str(done.exception))


def test_a_batch_is_at_most_what_the_client_holds(privpart):
    def row(*arguments):
        done = privpart(
            *("costs", "small_cnn", "--train", "dense2.*", "--format", "json"), *arguments
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["rows"]

    assert row("--examples", "4", "--batch-size", "16") == row(
        "--examples", "4", "--batch-size", "4"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_batch_that_does_not_fit_into_memory_is_one_sentence():
    # The small one loads the libraries: torch may end the process if memory lacks while it loads.
    limited = (
        "import resource, sys\n"
        "from contextlib import suppress\n"
        "from privpart.cli.main import main\n"
        "with suppress(SystemExit):\n"
        "    sys.argv = 'privpart costs small_cnn --format json'.split()\n"
        "    main()\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 500_000_000,) * 2)\n"
        "sys.argv = 'privpart costs emnist_cnn --examples 65536 --batch-size 65536'.split()\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "--batch-size 65536: a step on that many examples does not fit" in done.stderr
    assert "Traceback" not in done.stderr
