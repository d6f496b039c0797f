"""A node's worker: one process that answers all messages. Its processes import this file."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("flwr") is None:
    pytest.skip("Flower is not in this environment: make messages", allow_module_level=True)


@pytest.mark.slow
def test_one_process_of_a_node_answers_all_rounds(tmp_path):
    """The model is that of one process, and Flower starts none for a message."""
    import torch
    from deployment import Deployment
    from small import SEED, plan_of, train_here, write_app

    from privpart.training.export import released_parameters

    out = tmp_path / "run"
    app = write_app(tmp_path / "app", out, plan_of(rounds=3), "worked", seed=SEED)
    names, seen = ("north", "south"), set()
    with Deployment(tmp_path / "deployment") as deployed:
        deployed.start_superlink()
        deployed.register(*names)
        for number, name in enumerate(names):
            deployed.start_node(name, f"partition-id={number} num-partitions=2", worker=True)
        run = deployed.submit(app)

        def finished():
            seen.update((pid, line) for pid, line in deployed.ours() if "superlink" not in line)
            return not deployed.server_app()

        deployed.wait_for(deployed.server_app, "the ServerApp works")
        deployed.wait_for(finished, "the ServerApp ends")
        assert deployed.status(run) == "finished:completed", deployed.said(run)
    assert len([line for _, line in seen if "spawn_main" in line]) == len(names)
    assert not [line for _, line in seen if "flwr-clientapp" in line]
    assert torch.equal(released_parameters(out)[0], train_here(app, SEED))


def pretend(tokens, address, certificates):
    """Stand in the place of the process of an app, which dies of one of its tasks."""
    while True:
        try:
            if tokens.recv() == "dies":
                os._exit(3)
        except EOFError:
            return
        tokens.send(None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Flower's own imports
def test_the_process_of_an_app_lives_from_task_to_task_and_of_one_version(monkeypatch, capfd):
    from flwr.proto.runtime_pb2 import AcquireTaskResponse
    from flwr.proto.task_pb2 import Task

    from privpart.flower import worker

    tasks = [("a", "1"), ("a", "2"), ("", ""), ("b", "3"), ("b", "dies"), ("b", "4")]
    processes = []

    class Client:
        def AcquireTask(self, _):  # noqa: N802  Flower's name
            if not tasks:
                raise KeyboardInterrupt
            version, token = tasks.pop(0)
            task = Task(fab_hash=version) if token else None
            return AcquireTaskResponse(task=task, token=token)

        def close(self):
            processes.append("closed")

    class Child(worker._Child):
        def answer(self, token):
            processes.append(self._process.pid)
            super().answer(token)

    monkeypatch.setattr(worker, "_client", lambda *_: Client())
    monkeypatch.setattr(worker, "_Child", Child)
    monkeypatch.setattr(worker, "_answer_tasks", pretend)
    monkeypatch.setattr(worker, "POLL", 0.01)
    with pytest.raises(KeyboardInterrupt):
        worker.serve_node("127.0.0.1:1")
    one, same, other, dies, after, closed = processes
    assert one == same
    assert other == dies
    assert len({one, other, after}) == 3
    assert closed == "closed"
    assert "the process of the app ended with 3" in capfd.readouterr().err


@pytest.mark.parametrize("address", ["nonsense", ":9094", "127.0.0.1:", "127.0.0.1:http"])
def test_an_address_that_is_none_is_refused_in_a_sentence(address, monkeypatch, capsys):
    from privpart.flower import worker

    monkeypatch.setattr("sys.argv", ["worker", address])
    monkeypatch.setattr(worker, "serve_node", lambda *_: pytest.fail("waits"))
    with pytest.raises(SystemExit, match="2"):
        worker.main()
    assert f"{address!r}: write HOST:PORT, such as 127.0.0.1:9094" in capsys.readouterr().err
