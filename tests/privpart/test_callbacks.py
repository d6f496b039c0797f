import csv
import json
import sys
import types

import pytest

from accounting import ConfigError
from privpart.loop import MetricsFiles, ProgressBar, RoundRecord, TensorBoard
from privpart.server import RoundCounts

COUNTS = RoundCounts(3, 2, 1)


def test_metrics_go_on_in_the_same_files_and_tell_nothing_of_who_came(tmp_path):
    first = MetricsFiles(tmp_path)
    first(RoundRecord(0, COUNTS, None))
    first(RoundRecord(1, COUNTS, 0.25))
    MetricsFiles(tmp_path)(RoundRecord(2, COUNTS, 0.5))  # as after a resume
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["round"], row["metric"]) for row in lines] == [(0, None), (1, 0.25), (2, 0.5)]
    assert all(set(row) == {"round", "metric", "seconds"} for row in lines)
    with (tmp_path / "metrics.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [(row["round"], row["metric"]) for row in rows] == [
        ("0", ""),
        ("1", "0.25"),
        ("2", "0.5"),
    ]


def test_progress_is_on_standard_error(capsys):
    with ProgressBar(4, done=1) as bar:
        bar(RoundRecord(1, COUNTS, None))
        bar(RoundRecord(2, COUNTS, 0.5))
    told = capsys.readouterr()
    assert told.out == ""
    assert "round 3: test accuracy 50.0%" in told.err
    assert "3/4" in told.err


def test_tensorboard_is_an_option(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        TensorBoard(tmp_path)
    written = []

    class SummaryWriter:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, *scalar):
            written.append(scalar)

        def close(self):
            written.append("closed")

    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with TensorBoard(tmp_path) as board:
        board(RoundRecord(0, COUNTS, None))
        board(RoundRecord(1, COUNTS, 0.5))
    assert written == [str(tmp_path), ("metric", 0.5, 2), "closed"]
