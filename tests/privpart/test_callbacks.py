import json

from privpart.loop import RoundRecord
from privpart.server import RoundCounts
from privpart.training.callbacks import MetricsFile
from privpart.training.progress import ProgressBar

COUNTS = RoundCounts(2, 2, 0, asked=2)


def test_metrics_go_on_in_the_same_files_and_tell_nothing_of_who_came(tmp_path):
    first = MetricsFile(tmp_path)
    first(RoundRecord(0, COUNTS))
    first(RoundRecord(1, COUNTS, {"accuracy": 0.25, "loss": 2.0}))
    MetricsFile(tmp_path)(RoundRecord(2, COUNTS, {"accuracy": 0.5}))  # as after a resume
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    metrics = [{}, {"accuracy": 0.25, "loss": 2.0}, {"accuracy": 0.5}]
    assert lines == [{"round": number, "metrics": each} for number, each in enumerate(metrics)]


def test_progress_is_on_standard_error(capsys):
    with ProgressBar(4, done=1) as bar:
        bar(RoundRecord(1, COUNTS))
        bar(RoundRecord(2, COUNTS, {"accuracy": 0.5}))
    told = capsys.readouterr()
    assert told.out == ""
    assert "round 3: accuracy 50.0%" in told.err
    assert "3/4" in told.err


def test_names_of_metrics_are_shown_as_they_are(capsys):
    with ProgressBar(4, accuracy=False) as bar:
        bar(RoundRecord(0, COUNTS, {"loss [/nats] [red]": 0.5}))
    assert "round 1: loss [/nats] [red] 0.5" in capsys.readouterr().err


def test_a_round_that_takes_long_says_how_many_clients_have_answered(capsys):
    """In a log a line per minute, of rounds of more than a minute."""
    now = [0.0]
    with ProgressBar(4, clock=lambda: now[0]) as bar:
        for number, seconds in ((0, (0, 59)), (1, (100, 130, 161, 170, 230)), (2, (300,))):
            for done, second in enumerate(seconds, start=1):
                now[0] = second
                bar.heard(number, 1000 * done, 5000)
            bar(RoundRecord(number, COUNTS, {"accuracy": 0.5}))
    said = [line.strip() for line in capsys.readouterr().err.splitlines() if "5,000" in line]
    assert said == ["round 2: 3,000 of 5,000 clients", "round 2: 5,000 of 5,000 clients"]


def test_a_cohort_that_fell_short_says_why_once_per_set_of_reasons(capsys):
    limit, apart = {"participation limit": 2}, {"separation": 1}
    fewer = RoundCounts(3, 2, 1, asked=3, refusals={"malformed": 1}, refused_clients=1)
    with ProgressBar(4) as bar:
        for round_, (counts, why) in enumerate(
            [(COUNTS, {}), (fewer, limit), (fewer, limit), (fewer, apart)]
        ):
            bar(RoundRecord(round_, counts, not_asked=why))
    said = [line for line in capsys.readouterr().err.splitlines() if "cohort" in line]
    assert [line.strip() for line in said] == [
        "round 2: 2 of the 5 clients of the cohort counted: 2 not asked (2 participation limit); "
        "1 refused (1 malformed). Not for release; later rounds like it are not listed.",
        "round 4: 2 of the 4 clients of the cohort counted: 1 not asked (1 separation); "
        "1 refused (1 malformed). Not for release; later rounds like it are not listed.",
    ]
