"""Six jobs of people who train: schedules, two metrics, kill -9, resume, early stop, export."""

import subprocess
import sys
from pathlib import Path

import jobs
import pytest
import torch
from jobs import EVERY, JOBS, ROUNDS, network_of, work
from safetensors.torch import load_file

from accounting import ConfigError
from privpart import StopTraining


def bits(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.contiguous().view(-1).view(torch.uint8) for n, t in module.state_dict().items()}


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    first, second = bits(one), bits(other)
    return first.keys() == second.keys() and all(first[n].equal(second[n]) for n in first)


@pytest.fixture(scope="module", params=JOBS)
def job(request, tmp_path_factory):
    """Name, folder and whole run of a job."""
    folder = tmp_path_factory.mktemp("job")
    return request.param, folder, work(request.param, folder, "whole")


def interrupt(record):
    if record.round == 2:
        raise KeyboardInterrupt


def test_it_is_interrupted_resumed_measured_and_exported(job, tmp_path):
    name, folder, whole = job
    with pytest.raises(KeyboardInterrupt):
        work(name, folder, "interrupted", callbacks=[interrupt])
    resumed = work(name, folder, "interrupted", resume=True)
    assert same(resumed.module(), whole.module())
    rows = {row["round"]: row["metrics"] for row in resumed.metrics()}
    assert rows == {row["round"]: row["metrics"] for row in whole.metrics()}
    measured = [r for r in rows if rows[r]]
    assert {ROUNDS - 1, *range(EVERY - 1, ROUNDS, EVERY)} <= set(measured)
    assert {len(rows[r]) for r in measured} == {2}
    assert rows[ROUNDS - 1] == pytest.approx(JOBS[name].metric(whole.module()))
    start, network = (network_of(JOBS[name]) for _ in range(2))
    stored = load_file(resumed.export(tmp_path / "model.safetensors"))
    assert {n: t.dtype for n, t in stored.items()} == {
        n: t.dtype for n, t in network.state_dict().items()
    }
    network.load_state_dict(stored)
    assert same(network, whole.module())
    frozen = [p for p in network.parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} == ({JOBS[name].frozen} - {None})
    for (named, before), after in zip(start.named_parameters(), network.parameters(), strict=True):
        assert before.equal(after) != before.requires_grad, named
    with pytest.raises(ConfigError, match="metric: is not what"):
        work(name, folder, "interrupted", resume=True, metric=repr)


def test_it_stops_early_as_finished(job):
    name, folder, whole = job

    def enough(record):
        if record.round == 3:
            raise StopTraining("good enough")

    stopped = work(name, folder, "stopped", callbacks=[enough])
    assert stopped.history[-1].stopped == "good enough"
    assert len(stopped.history) == 4 + (stopped.history[0].round < 0)
    assert not same(stopped.module(), whole.module())
    again = work(name, folder, "stopped", resume=True)
    assert not again.history
    assert same(again.module(), stopped.module())


def killed(name: str, folder: Path) -> None:
    code = (
        f"import pathlib, sys; sys.path.insert(0, {str(Path(jobs.__file__).parent)!r}); "
        f"import jobs; folder = pathlib.Path({str(folder)!r}); "
        f"jobs.work({name!r}, folder, 'killed', callbacks=[jobs.kill])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == -9, process.stderr


def killed_run_is_whole(name, folder, whole):
    killed(name, folder)
    assert same(work(name, folder, "killed", resume=True).module(), whole.module())


def test_one_is_killed_and_resumed(tmp_path):
    killed_run_is_whole("regression", tmp_path, work("regression", tmp_path, "whole"))


@pytest.mark.slow
def test_it_is_killed_and_resumed(job):
    killed_run_is_whole(*job)
