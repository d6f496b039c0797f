"""Metrics by name and by group, whole however often a run resumes; and trainings that stop."""

import os
import signal
import sys
import types

import pytest
import torch
from torch import nn

import privpart as package
from accounting import ConfigError
from privpart import Accuracy, RoundRecord, RunFolder, StopTraining, TensorBoard
from privpart.run.budget_book import accounts
from privpart.run.ledger import Ledger
from privpart.run.report import run_report
from privpart.server import RoundCounts
from privpart.training import train as training
from privpart.training.callbacks import METRICS, MetricsError, MetricsFile
from privpart.training.export import privacy_metadata
from privpart.training.progress import ProgressBar
from privpart.training.verify import check_run

ROUNDS = 4
SAYS = "privpart.statement"
X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
PLACES = ["north", "south", "south", "south"] * 2


class People:
    ids = tuple(range(ROUNDS))

    def examples(self, client):
        return X[client : client + 1], Y[client : client + 1]


@pytest.fixture(autouse=True)
def _machine_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PRIVPART_STATE_DIR", str(tmp_path / "state"))


def plan(**data):
    return {
        "privacy": {
            "rounds": ROUNDS,
            "clip_norm": 1.0,
            "noise_multiplier": 1.0,
            "delta": 1e-5,
            "mechanism": {"name": "tree"},
        },
        "data": {"clients_per_round": 1, "population": "people", **data},
        "client": {"learning_rate": 0.1},
    }


def metric(module):
    """Two metrics."""
    outputs = module(X)
    return {
        "accuracy": (outputs.argmax(1) == Y).float().mean(),
        "loss": nn.functional.cross_entropy(outputs, Y).item(),
    }


def trained(tmp_path, data=None, **options):
    arguments = {"metric": metric, "evaluate_every": 2, "progress": False, **options}
    module = nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.fill_(0.1)
        module.bias.zero_()
    return package.train(
        module, People(), plan=plan(**(data or {})), out=tmp_path / "run", **arguments
    )


def stop_after(number, reason="enough"):
    def callback(record):
        if record.round == number:
            raise StopTraining(reason)

    return callback


def by_round(run):
    return [(row["round"], sorted(row["metrics"])) for row in run.metrics()]


BOTH = ["accuracy", "loss"]


# Metrics


def test_several_metrics_before_training_and_at_chosen_rounds(tmp_path):
    seen, logged = [], []
    logger = types.SimpleNamespace(log=lambda metrics, step=None: logged.append((step, metrics)))
    run = trained(tmp_path, {"evaluate_at": [0, 1]}, seed=1, callbacks=[seen.append, logger])
    expected = [(-1, BOTH), (0, BOTH), (1, BOTH), (2, []), (3, BOTH)]
    assert [(r.round, sorted(r.metrics)) for r in run.history] == expected
    assert by_round(run) == expected
    assert seen == list(run.history)
    assert logged == [(r.round + 1, dict(r.metrics)) for r in run.history if r.metrics]
    assert run.history[0].metric == run.history[0].metrics["accuracy"]
    assert run.history[0].counts.received == 0


def test_accuracy_by_group_of_public_examples(tmp_path):
    run = trained(tmp_path, metric=Accuracy(X, Y, groups=PLACES), evaluate_every=1, seed=1)
    values = run.history[-1].metrics
    assert list(values) == ["accuracy", "accuracy/north", "accuracy/south"]
    assert values["accuracy"] == pytest.approx(
        (2 * values["accuracy/north"] + 6 * values["accuracy/south"]) / 8
    )
    assert values["accuracy"] == Accuracy(X, Y)(run.module())
    numbers = torch.tensor([7, 9, 9, 9] * 2)
    assert Accuracy(X, Y, numbers)(run.module())["accuracy/7"] == values["accuracy/north"]


@pytest.mark.parametrize(
    ("groups", "labels", "words"),
    [
        (["a"] * 7, Y, "groups: are 7 for 8 examples"),
        (["a"] * 7 + ["b"], Y.clone().index_fill(0, torch.tensor(7), -100), "'b' has no example"),
    ],
)
def test_groups_that_are_wrong(groups, labels, words):
    with pytest.raises(ConfigError, match=words):
        Accuracy(X, labels, groups)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"metric": lambda _: {}}, "must be one or more names"),
        ({"metric": lambda _: {1: 0.5}}, "must be one or more names"),
        ({"metric": lambda _: {"a": "b"}}, "metric: 'a': returned .*; must be one number"),
        ({"metric": lambda _: torch.ones(2)}, "of shape .2,.; must be one number"),
        ({"data": {"evaluate_at": [5]}}, "must ascend from 0, before training, to at most 4"),
        ({"data": {"evaluate_at": [2, 1]}}, "must ascend"),
        ({"data": {"evaluate_at": [-1]}}, "must ascend"),
        ({"data": {"evaluate_at": [0]}, "metric": None}, "there is no metric to evaluate by"),
        ({"callbacks": [types.SimpleNamespace(log=3)]}, "must be a list of functions"),
        ({"callbacks": [TensorBoard]}, "must be a list of functions"),
        ({"callbacks": TensorBoard}, "callbacks: are .*TensorBoard"),
        (
            {"callbacks": [types.SimpleNamespace(log=lambda metrics: None)]},
            r"not called as log\(metrics, step=0\)",
        ),
    ],
)
def test_what_is_wrong_is_said_before_the_run_exists(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        trained(tmp_path, **options)
    assert not (tmp_path / "run").exists()


def test_a_run_that_resumes_has_every_line_once(tmp_path, monkeypatch):
    """Killed between a commit and its line, within the line, and before training."""
    told = []

    def die_at(number):
        def callback(record):
            told.append(record.round)
            if record.round == number:
                raise KeyboardInterrupt

        return callback

    def interrupted(*_):
        raise KeyboardInterrupt

    file = tmp_path / "run" / METRICS
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, {"evaluate_at": [0]}, callbacks=[die_at(-1)], resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "commit", interrupted)  # after the line before training
        with pytest.raises(KeyboardInterrupt):
            trained(tmp_path, {"evaluate_at": [0]}, callbacks=[die_at(None)], resume=True)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, {"evaluate_at": [0]}, callbacks=[die_at(1)], resume=True)
    with file.open("a") as torn:
        torn.write('{"round": 1, "metr')
    run = trained(tmp_path, {"evaluate_at": [0]}, callbacks=[die_at(None)], resume=True)
    assert told == [-1, -1, 0, 1, 1, 2, 3]
    assert by_round(run) == [(-1, BOTH), (0, []), (1, BOTH), (2, []), (3, BOTH)]
    # The last line was lost, as if the crash had come after the last commit.
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    again = trained(tmp_path, {"evaluate_at": [0]}, resume=True)
    assert [r.round for r in again.history] == [3]
    assert again.history[0].counts.counted == 1
    assert by_round(again) == by_round(run)
    assert not trained(tmp_path, {"evaluate_at": [0]}, resume=True).history


def test_lines_that_are_none_are_named(tmp_path):
    for text in ("3\n", "{}\n", "nonsense\n", '{"round": "2"}\n', "[" * 20000 + "\n"):
        (tmp_path / METRICS).write_text(text)
        with pytest.raises(MetricsError, match="cannot be read"):
            MetricsFile(tmp_path)


# Stopping


def stopped_run(tmp_path, number=1, **options):
    return trained(tmp_path, callbacks=[stop_after(number)], **options)


def test_a_callback_stops_a_run_which_is_then_finished(tmp_path, privpart):
    run = stopped_run(tmp_path)
    assert [r.stopped for r in run.history] == [None, "enough"]
    assert run.metrics()[-1]["stopped"] == "enough"
    report = run.report()
    assert (report.rounds, report.closed, report.complete) == (2, True, False)
    choices = next(a for a in report.guarantee.assumptions if a.code == "choices")
    assert choices.status == "asserted"
    assert choices.evidence.startswith("the training itself ended the run after 2 rounds")
    whole = trained(tmp_path / "whole").report()
    assert report.guarantee.epsilon == whole.guarantee.epsilon
    assert not whole.unfinished()
    for text in (run.statement(), report.statement(), privacy_metadata(run.path, "trained")[SAYS]):
        assert "closed after 2 of 4 planned rounds. The figures are for all 4" in text
    names = {file.name for file in run.path.iterdir()}
    assert names == {"ledger.log", "lock", "closed-000002.safetensors", METRICS}
    assert all(line.status != "wrong" for line in check_run(run.path))
    assert run.export(tmp_path / "model.safetensors").exists()
    again = trained(tmp_path, resume=True)
    assert not again.history
    theirs = run.module().state_dict()
    assert all(torch.equal(own, theirs[name]) for name, own in again.module().state_dict().items())
    told = privpart("report", str(run.path))
    assert told.returncode == 0
    assert "closed after 2 of 4 rounds" in told.stdout
    assert privpart("verify", str(run.path)).returncode == 0
    told = privpart("train", "--resume", "--out", str(run.path))
    assert told.returncode == 0
    assert "stopped itself after 2 of 4 rounds: enough. The run is finished." in told.stderr
    assert "verdict" in told.stdout


def test_what_is_passed_beside_a_stopped_run_is_checked(tmp_path):
    run = stopped_run(tmp_path)
    for options, words in (
        ({"seed": 3}, "seed=3"),
        ({"metric": lambda _: 0.5}, "metric: is not what"),
        ({"data": {"population": "others"}}, "is not the run's plan"),
    ):
        with pytest.raises(ConfigError, match=words):
            trained(tmp_path, resume=True, **options)
    with pytest.raises(ConfigError, match="was ended early"):
        RunFolder.open(run.path)


def test_closed_by_hand_is_not_finished_by_its_training(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, callbacks=[lambda _: (_ for _ in ()).throw(KeyboardInterrupt)])
    with RunFolder.open(tmp_path / "run") as run:
        run.end_early()
    report = run_report(tmp_path / "run").guarantee
    assert not next(a for a in report.assumptions if a.code == "choices").evidence
    with pytest.raises(ConfigError, match="was ended early"):
        trained(tmp_path, resume=True)


def test_a_metric_stops_before_training_which_costs_nothing_or_after_the_last_round(tmp_path):
    def stops(module):
        raise StopTraining

    first = trained(tmp_path / "first", {"evaluate_at": [0]}, metric=stops)
    assert (first.history[0].round, first.history[0].stopped) == (-1, "")
    assert (first.report().rounds, first.report().closed) == (0, True)
    (account,) = accounts()
    assert account.total is None
    last = trained(tmp_path / "last", callbacks=[stop_after(ROUNDS - 1)])
    assert (last.report().complete, last.report().closed) == (True, False)
    assert not trained(tmp_path / "last", resume=True, callbacks=[]).history


def test_every_callback_gets_the_record_of_the_last_round(tmp_path):
    seen = []
    callbacks = [stop_after(1, "first"), seen.append, stop_after(1, "second"), seen.append]
    run = trained(tmp_path, callbacks=callbacks)
    assert [r.round for r in seen] == [0, 0, 1, 1]
    assert run.history[-1].stopped == seen[-1].stopped == "first"


def test_a_loss_or_a_private_metric_stops_nothing(tmp_path):
    """Both see what clients hold: that a run stopped would tell of it."""

    def loss(module, batch):
        if batch[0].shape[0] and float(batch[0][0, 0]) == float(X[2, 0]):
            raise StopTraining("client 2 came")
        return module(batch[0]).square().mean()

    with pytest.raises(ConfigError, match=r"loss.*StopTraining: client 2 came"):
        trained(tmp_path, loss=loss)
    report = run_report(tmp_path / "run")
    assert (report.rounds < ROUNDS, report.closed) == (True, False)


def test_a_measure_of_private_metrics_stops_nothing():
    from privpart.training.metric import number_of

    def measure(module):
        raise StopTraining("user 3 is badly served")

    with pytest.raises(ConfigError, match="recall: raised StopTraining"):
        number_of(measure, nn.Linear(1, 1), "recall")
    with pytest.raises(ConfigError, match="must be one number"):
        number_of(lambda _: {"a": 1.0}, nn.Linear(1, 1), "recall")


def test_a_run_that_diverges_stops_as_asked(tmp_path):
    run = trained(tmp_path, callbacks=[stop_after(0)], loss=lambda m, b: m(b[0]).sum() * torch.inf)
    assert run.report().closed


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 19])
def test_killed_at_any_instant_a_run_stops_once_and_has_every_line_once(tmp_path, stride):
    """SIGKILL before a call that makes something durable; then the same command with resume."""
    for instant in range(1, 200, stride):
        place = tmp_path / str(instant)
        child = os.fork()
        if child == 0:
            _killed_at(instant)
            stopped_run(place, data={"evaluate_at": [0]})
            os._exit(0)
        finished = os.waitpid(child, 0)[1] == 0
        run = stopped_run(place, data={"evaluate_at": [0]}, resume=True)
        assert by_round(run) == [(-1, BOTH), (0, []), (1, BOTH)], instant
        report = run.report()
        assert (report.rounds, report.closed, report.wrong) == (2, True, ()), instant
        assert not (run.path / "key").exists()
        assert not (run.path / "signing-key").exists()
        assert not stopped_run(place, data={"evaluate_at": [0]}, resume=True).history
        if finished:
            break
    assert finished
    assert instant > 40


def _killed_at(instant):
    calls = iter(range(1, 10**6))

    def counted(call):
        def before(*arguments, **options):
            if next(calls) == instant:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return before

    for name in ("fsync", "unlink", "replace", "rename"):
        setattr(os, name, counted(getattr(os, name)))


def test_a_stop_is_asked_for_again_by_the_line_alone(tmp_path, monkeypatch):
    """A crash came between the line and the end of the run: the resumed one does not train on."""
    with monkeypatch.context() as patch:
        patch.setattr(training, "_ended_as_asked", lambda *_: False)
        stopped_run(tmp_path)
    assert "closed" not in Ledger(tmp_path / "run").facts
    run = trained(tmp_path, resume=True)
    assert (run.history, run.report().rounds, run.report().closed) == ((), 2, True)


# Loggers


@pytest.fixture
def board(monkeypatch):
    """A stand-in for torch.utils.tensorboard, whose package is an extra."""
    written = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            written.append(("open", folder, purge_step))

        def add_scalar(self, name, value, step, walltime):
            written.append((name, value, step, walltime))

        def flush(self):
            pass

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return written


def test_tensorboard_gets_steps_in_place_of_times(tmp_path, board):
    logger = TensorBoard(tmp_path / "board")
    run = trained(tmp_path, callbacks=[logger])
    assert board[0] == ("open", str(tmp_path / "board"), 2)
    first, last = (r.metrics for r in run.history if r.metrics)
    assert board[1:] == [
        (name, values[name], step, float(step))
        for step, values in ((2, first), (4, last))
        for name in BOTH
    ]
    logger.log({"loss": 1.0}, step=4)  # as after a resume in the same process
    assert board[-2:] == [("open", str(tmp_path / "board"), 4), ("loss", 1.0, 4, 4.0)]


def test_tensorboard_is_checked_before_a_run_exists(tmp_path, board, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written; name another folder"):
        TensorBoard(tmp_path / "file" / "board")
    assert not (tmp_path / "board").exists()
    assert TensorBoard(tmp_path / "board")
    assert not (tmp_path / "board").exists()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="TensorBoard: is not installed: pip install tensorboard"):
        TensorBoard(tmp_path / "board")


def test_a_board_that_cannot_be_written_any_more_leaves_a_run_to_resume(tmp_path, board):
    logger = TensorBoard(tmp_path / "board")
    (tmp_path / "board").write_text("")

    def refuse(*_, **__):
        raise FileExistsError("a file")

    logger._open = refuse
    with pytest.raises(MetricsError, match=r"cannot be written: a file\. Rounds that were"):
        logger.log({"a": 1.0}, step=1)


def test_a_record_is_told_once(tmp_path):
    file = MetricsFile(tmp_path)
    for _ in range(2):
        file(RoundRecord(0, RoundCounts(1, 1, 0), {"a": float("nan")}))
    assert (tmp_path / METRICS).read_text() == '{"round": 0, "metrics": {"a": null}}\n'


def test_progress_by_client_is_not_shown_of_samples(tmp_path, monkeypatch, capsys):
    """How many were drawn is secret; of planned cohorts everybody knows."""
    told = []
    monkeypatch.setattr(ProgressBar, "heard", lambda _, *numbers: told.append(numbers))
    trained(tmp_path, progress=True)
    assert told == [(number, 1, 1) for number in range(ROUNDS)]
    told.clear()
    sampled = plan()
    sampled["privacy"] |= {
        "sampling": {"name": "poisson", "expected_batch": 2, "population": ROUNDS},
        "mechanism": {"name": "independent"},
    }
    del sampled["data"]["clients_per_round"]
    package.train(nn.Linear(3, 2), People(), plan=sampled, out=tmp_path / "sampled", progress=True)
    assert run_report(tmp_path / "sampled").complete
    assert told == []
