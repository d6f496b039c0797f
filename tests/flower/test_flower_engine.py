"""The Flower engine over Flower's own messages, in one process and as bytes."""

import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower has an environment of its own: make messages")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from in_process import NODES, InProcessGrid, write_plan
from small import TASK

import privpart
from accounting.checks import ConfigError
from privpart.flower.downlink import Downlink, Held
from privpart.flower.node import client_app
from privpart.flower.server import Settings, serve
from privpart.messages import RoundTask
from privpart.run.ledger import Ledger
from privpart.run.report import run_report
from privpart.training.export import export
from privpart.training.train import released_setup
from privpart.training.verify import check_run

pytestmark = pytest.mark.usefixtures("fresh_code")


def released(run: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    (state,) = run.glob("state-*.safetensors")
    return load_file(state)["parameters"]


def settings(out: Path, **changes) -> Settings:
    given = {"out": str(out), "nodes": 2, "authenticated": True, "timeout": 1.0, "seed": 3}
    return Settings(**{**given, **changes})


@pytest.mark.parametrize("authenticated", [True, False])
def test_the_last_model_is_the_embedded_engines_also_when_resumed(tmp_path, authenticated):
    """Without authentication, also over nodes that were started again, which are new ones."""
    plan = write_plan(tmp_path)
    privpart.train(plan=plan, out=tmp_path / "embedded", seed=3, deterministic=True, progress=False)
    apps = {node: client_app(plan) for node in NODES}
    out = tmp_path / "flower"

    class StoppedError(Exception):
        pass

    def stop(record):
        if record.round == 1:
            raise StoppedError

    given = settings(out, authenticated=authenticated)
    with pytest.raises(StoppedError):
        serve(InProcessGrid(apps), plan, given, callbacks=[stop], poll=0.01)
    if not authenticated:
        apps = {node - 1: client_app(plan) for node in NODES}
    serve(InProcessGrid(apps), plan, given, poll=0.01)
    assert torch.equal(released(out), released(tmp_path / "embedded"))


def test_loggers_get_the_metrics_and_a_callback_that_stops_the_run_finishes_it(tmp_path):
    plan = write_plan(tmp_path)
    plan.write_text(plan.read_text().replace("[data]", '[data]\nmetric = "./task.py:weight"'))
    with (tmp_path / "task.py").open("a") as file:
        file.write("\n\ndef weight(module):\n    return float(module.head.weight[0, 0])\n")
    apps, out, logged, lines = {node: client_app(plan) for node in NODES}, tmp_path / "run", [], []

    class Logger:
        def log(self, metrics, step=None):
            logged.append((step, sorted(metrics)))

    def stop(record):
        if record.round == 1:
            raise privpart.StopTraining("enough")

    given = settings(out, seed=None, evaluate_every=1)
    serve(InProcessGrid(apps), plan, given, callbacks=[Logger(), stop], poll=0.01)
    assert logged == [(1, ["metric"]), (2, ["metric"])]
    report = run_report(out)
    assert (report.rounds, report.closed) == (2, True)
    assert all(check.status != "wrong" for check in check_run(out))
    # nobody is asked again
    grid = InProcessGrid(apps)
    serve(grid, plan, given, callbacks=[stop], poll=0.01, report=lines.append)
    assert not grid.sent
    assert lines == [f"{out}: the training stopped itself; the run is finished."]


@pytest.mark.parametrize("authenticated", [True, False])
def test_participation_is_verified_only_where_nodes_are_authenticated(tmp_path, authenticated):
    plan = write_plan(tmp_path)
    apps = {node: client_app(plan) for node in NODES}
    out = tmp_path / "run"
    given = settings(out, authenticated=authenticated, seed=None)
    serve(InProcessGrid(apps), plan, given, poll=0.01)
    word = "verified" if authenticated else "asserted"
    report = run_report(out)
    assert report.cost.precision is None  # nodes compute as they like
    (said,) = (a for a in report.guarantee.assumptions if a.code == "participation")
    assert said.status == word
    checks = {check.what: check for check in check_run(out)}
    assert checks["participation"].status == checks["identity"].status == word
    assert not [check for check in checks.values() if check.status == "wrong"]
    with pytest.raises(ConfigError, match="was made with"):
        serve(InProcessGrid(apps), plan, settings(out, authenticated=not authenticated), poll=0.01)


def test_a_client_declines_whatever_is_not_of_its_own_plan(tmp_path):
    plan = write_plan(tmp_path)
    app = client_app(plan)
    grid = InProcessGrid({node: client_app(plan) for node in NODES})
    serve(grid, plan, settings(tmp_path / "run"), poll=0.01)
    (task, *_) = (m for m in grid.sent if m.metadata.message_type == "train")
    node = task.metadata.dst_node_id
    share = {"partition-id": NODES.index(node), "num-partitions": 2}
    share["ledger"] = str(tmp_path / "node")

    def answered(vector=task.content["model"]["trainable"], **changes):
        fields = ConfigRecord({**task.content["task"], **changes})
        content = RecordDict({"model": ArrayRecord({"trainable": vector}), "task": fields})
        reply = app(
            Message(content, dst_node_id=node, message_type="train"),
            Context(1, node, share, RecordDict(), {}),
        )
        return reply.content

    assert set(answered()) == {"updates", "task", "statement"}
    assert set(answered()["task"]) == {"schema", "plan", "layout", "fingerprint", "seed", "round"}
    others = {"schema": "privpart/flower/0", "plan": "0" * 64, "layout": "", "fingerprint": ""}
    others |= {"seed": "1", "round": 4, "clip_norm": 0.6, "active": "[0]", "clients": ["23x"]}
    for name, value in others.items():
        content = answered(**{name: value})
        assert set(content) == {"declined"}, name
        assert "server" in content["declined"]["why"], name
    not_mine = answered(clients=[str(1 - NODES.index(node))])
    assert "does not have" in not_mine["declined"]["why"]
    # whatever it claims to be, it takes no memory, and leaves nothing in the node's ledger
    entered = (tmp_path / "node" / "answers.db").read_bytes()
    long = "[" + "[]," * 10**6 + "[]]"
    tracemalloc.start()
    for changes in (
        {"vector": claiming(10**12)},
        {"vector": claiming(10**12), "groups": "0"},
        {"vector": Array(np.zeros(10**4, np.float32))},
        {"vector": Array("object", (4,), "numpy.ndarray", b"\x80\x04N.")},
        {"groups": long, "vector": claiming(34)},
        {"run": long},
        {"run": ""},
        {"moves": "[" + "[]," * 6 * 10**6 + "[]]"},
        {"moves": '[{"text": "{}", "signature": "00"}]'},
        {"moves": "[" * 10**5},
        {"active": long},
        {"schema": [long] * 3},
        {"clients": ["0", "0"]},
        {"clients": ["[" * 4000]},
        {"clients": 3},
    ):
        reply = answered(**{"round": 1, **changes})
        assert set(reply) <= {"declined", "lacks"}, changes
        assert sum(len(str(record)) for record in reply.values()) < 10**4
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**26, peak
    assert (tmp_path / "node" / "answers.db").read_bytes() == entered


def claiming(length):
    """Return an array of no bytes whose header claims a length."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({length},), }}\n".encode()
    head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    return Array("float32", (length,), "numpy.ndarray", head)


@pytest.mark.parametrize("kind", [KeyError, SystemExit])
def test_the_text_of_an_error_stays_on_its_node(kind, tmp_path, capsys):
    def clients(_):
        raise kind("the record of patient 17")

    app = client_app(write_plan(tmp_path), clients=clients)
    task = Message(RecordDict({"task": ConfigRecord()}), dst_node_id=3, message_type="query")
    reply = app(task, Context(1, 3, {}, RecordDict(), {}))
    assert reply.content["declined"]["why"] == "an error; see the log of the node"
    assert "patient 17" in capsys.readouterr().err


def test_a_run_over_flower_is_refused_with_other_code_plan_or_data_and_exported(tmp_path):
    plan = write_plan(tmp_path)
    apps = {node: client_app(plan) for node in NODES}
    serve(InProcessGrid(apps), plan, settings(tmp_path / "run"), poll=0.01)
    (tmp_path / "task.py").write_text(TASK.replace("def clients():", "def clients():#"))
    with pytest.raises(ConfigError, match="has changed"):
        serve(InProcessGrid(apps), plan, settings(tmp_path / "run"), poll=0.01)
    (tmp_path / "task.py").write_text(TASK)
    text = plan.read_text()
    plan.write_text(text.replace("momentum = 0.9", "momentum = 0.8"))
    with pytest.raises(ConfigError, match=r"is not the plan of the run in .*, which .* holds"):
        serve(InProcessGrid(apps), plan, settings(tmp_path / "run"), poll=0.01)
    plan.write_text(text)
    with pytest.raises(ConfigError, match="flwr run"):
        privpart.train(plan=plan, out=tmp_path / "run", resume=True)
    setup = released_setup(tmp_path / "run")
    with pytest.raises(ConfigError, match="on its node"):
        setup.clients.examples(0)
    export(tmp_path / "run", tmp_path / "model.safetensors", setup=setup)


def over_selected(tmp_path, name, change=lambda node, content: None):
    """Return who was in which rounds, of six asked and four counted, and the log of the run."""
    plan = tmp_path / "plan.toml"
    if not plan.exists():
        write_plan(tmp_path)
        text = plan.read_text().replace("clients_per_round = 4", "clients_per_round = 6")
        plan.write_text(text.replace("[model]", "report_goal = 4\n\n[model]", 1))

    def app(node):
        plain = client_app(plan)

        def answer(message, context):
            reply = plain(message, context)
            change(node, reply.content)
            return reply

        return answer

    said, out = [], tmp_path / name
    given = settings(out, timeout=600.0, first_answers=True, seed=None)
    serve(InProcessGrid({n: app(n) for n in NODES}), plan, given, poll=0.01, report=said.append)
    return Ledger(out).rounds_by_client(), said


def test_a_round_ends_with_the_first_answers_and_the_others_are_named_and_not_charged(tmp_path):
    rounds, said = over_selected(tmp_path, "run")
    assert sorted(map(len, rounds.values())) == [4, 4, 4, 4]
    late = sorted(set(range(6)) - rounds.keys())
    names = f"neither counted nor charged: {late[0]}, {late[1]}."
    assert sum(line.endswith(names) for line in said) == 4
    report = run_report(tmp_path / "run")
    assert not report.deviations
    words = {a.code: a for a in report.guarantee.assumptions}["participation"]
    assert words.status == "asserted"
    assert "the first answers counted" in words.evidence
    plan = tmp_path / "plan.toml"
    with pytest.raises(
        ConfigError, match=r"first_answers=False: the run in .* was made with first_answers=True"
    ):
        serve(InProcessGrid({}), plan, settings(tmp_path / "run"), poll=0.01)


def test_who_is_among_the_first_does_not_depend_on_values(tmp_path):
    """An update that is not finite, or too long, takes its place as any other."""
    came, _ = over_selected(tmp_path, "run")
    for number, value in enumerate((float("nan"), 1e30, 0.0)):

        def change(node, content, value=value):
            for name in [*content.get("updates", {})][:1]:
                array = content["updates"][name].numpy()
                content["updates"][name] = Array(np.full_like(array, value))

        assert over_selected(tmp_path, f"run{number}", change)[0] == came


def test_first_answers_of_no_more_clients_than_counted_are_refused(tmp_path):
    plan = write_plan(tmp_path)
    with pytest.raises(ConfigError, match="first_answers: needs clients_per_round above"):
        serve(InProcessGrid({}), plan, settings(tmp_path / "run", first_answers=True))


def test_a_round_waits_twice_as_long_as_a_percentile_of_answers_took(tmp_path):
    """A node that falls silent costs its timeout in none but the first rounds."""
    plan = by_turns(tmp_path, clients=6, cycles=3)
    grid = InProcessGrid({node: client_app(plan) for node in NODES})

    def silence(record):
        if record.round == 5:
            grid.offline.add(NODES[1])

    given = settings(tmp_path / "run", seed=None, timeout=3600.0, deadline_percentile=90)
    begun = time.monotonic()
    serve(grid, plan, given, callbacks=[silence], poll=0.01)
    assert time.monotonic() - begun < 3600
    assert (
        sorted(map(len, Ledger(tmp_path / "run").rounds_by_client().values())) == [6] * 3 + [7] * 3
    )
    words = {a.code: a for a in run_report(tmp_path / "run").guarantee.assumptions}["participation"]
    assert words.status == "asserted"
    assert "until a deadline that earlier ones set counted" in words.evidence
    with pytest.raises(ConfigError, match=r"deadline_percentile=None: the run in .* was made with"):
        serve(grid, plan, settings(tmp_path / "run", seed=None), poll=0.01)
    for wrong in (0, 101, float("nan")):
        with pytest.raises(ConfigError, match="deadline_percentile"):
            settings(tmp_path / "run", deadline_percentile=wrong)


def test_the_start_has_a_time_of_its_own(tmp_path):
    plan = write_plan(tmp_path)
    grid = InProcessGrid({NODES[0]: client_app(plan)})
    given = settings(tmp_path / "run", timeout=3600.0, start_timeout=0.1)
    with pytest.raises(ConfigError, match=r"others: 1 not connected; start them\. Then run again"):
        serve(grid, plan, given, poll=0.01)


def by_turns(tmp_path, clients=4, cycles=2):
    """Write a plan that trains all, then its two groups in turns: 0, 1, 0, 1."""
    plan, rounds = write_plan(tmp_path), 1 + 2 * cycles
    groups = '["head.weight"], ["head.bias", "body.bias"]'
    turns = f"cycles = {cycles}\nrounds_per_group = 1\nwarm_up = 1\nbetween = 0\n"
    text = plan.read_text().replace("rounds = 4", f"rounds = {rounds}")
    text = text.replace("max_participations = 4", f"max_participations = {rounds}")
    text = text.replace("clients_per_round = 4", f"clients_per_round = {clients}")
    text = text.replace(
        'train = ["head.*"]', f'train = ["head.*", "body.bias"]\ngroups = [{groups}]'
    )
    plan.write_text(f"{text}\n[schedule]\n{turns}")
    return plan


def sent_groups(grid):
    return [
        (m.content["task"]["groups"], len(m.content["model"]["trainable"].numpy()))
        for m in grid.sent
        if m.metadata.message_type == "train"
    ]


def test_a_node_is_sent_what_changed_since_the_round_it_answered(tmp_path):
    """The model is that of one process; a node that started again asks for the whole, once."""
    plan = by_turns(tmp_path)
    privpart.train(plan=plan, out=tmp_path / "embedded", seed=3, deterministic=True, progress=False)
    apps = {node: client_app(plan) for node in NODES}
    grid = InProcessGrid(apps)
    serve(grid, plan, settings(tmp_path / "run"), poll=0.01)
    assert torch.equal(released(tmp_path / "run"), released(tmp_path / "embedded"))
    whole, first, second = ("all", 50), ("0", 32), ("1", 18)
    assert sent_groups(grid) == [whole] * 4 + [first] * 2 + [second] * 2 + [first] * 2

    def forget(record):
        if record.round == 1:
            grid.apps.update((node, client_app(plan)) for node in NODES)

    grid = InProcessGrid(apps)
    serve(grid, plan, settings(tmp_path / "other"), callbacks=[forget], poll=0.01)
    assert torch.equal(released(tmp_path / "other"), released(tmp_path / "embedded"))
    assert sent_groups(grid) == [whole] * 4 + [first] * 2 + [whole] * 6


def test_a_part_of_a_model_is_what_changed_and_nothing_else_completes_it(tmp_path):
    model = released_model()
    down, held = Downlink(model), Held()
    vectors = [torch.arange(50.0)]
    for group in (0, 1):
        vectors.append(vectors[-1].clone())
        vectors[-1][model.spans([group])[0]] += 1
    for number, (active, vector) in enumerate(zip([(0,), (1,), (0,)], vectors, strict=True)):
        down.begin(RoundTask(number, (), 1.0, "", active), vector)
        if number == 0:
            assert down.groups(3) is None
            assert torch.equal(held.completed(model, *down.sent(None)), vector)
            down.answered(3)
        if number == 1:
            # it was not asked in this round
            assert down.groups(3) == (0,)
    assert down.groups(3) is None  # both groups, which are the whole
    fields, part = down.sent((0,))
    assert held.completed(model, fields, part) is None  # of an older model
    for groups in ("1 0", "2", "0 0", "[0]", "-1", "\u0660", 3, None):
        assert held.completed(model, {**fields, "groups": groups}, part) is None
    assert torch.equal(held.completed(model, *down.sent((0, 1))), vectors[-1])
    # a task that is sent again needs nothing
    down.answered(3)
    assert down.groups(3) == ()
    assert torch.equal(held.completed(model, *down.sent(())), vectors[-1])


def released_model():
    spaces = {}
    exec(TASK, spaces)
    groups = [["head.weight"], ["head.bias", "body.bias"]]
    return privpart.PartialModel(
        spaces["network"], train=["head.*", "body.bias"], seed=1, groups=groups
    )


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (
            "max_participations = 4\nmin_separation = 1\nminimum_cohort = 3\nmechanism = "
            '{ name = "tree" }',
            'sampling = { name = "poisson", expected_batch = 3, population = 6 }\n'
            "report_goal = 3\nmechanism = "
            '{ name = "independent" }',
            "nobody learns who was drawn",
        ),
        ("[client]", '[client]\nobjective = "moon"\nmu = 1.0', "a client's own models"),
        ("keep = []", 'keep = []\nlocal = ["body.*"]', "a client's own models"),
    ],
)
def test_what_no_network_carries_is_refused_before_anything_is_spent(tmp_path, old, new, why):
    plan = write_plan(tmp_path)
    assert old in plan.read_text()
    text = plan.read_text().replace(old, new)
    if "sampling" in new:
        text = text.replace("clients_per_round = 4\n", "")
    plan.write_text(text)
    grid = InProcessGrid({node: client_app(plan) for node in NODES})
    with pytest.raises(ConfigError, match=why):
        serve(grid, plan, settings(tmp_path / "run"), poll=0.01)
    assert not grid.sent
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "given", [{"out": "run"}, {"roster": "roster.toml"}, {"operator": "0" * 64, "moves": "moves"}]
)
def test_paths_of_a_server_are_absolute_as_flower_runs_a_copy_of_the_app(tmp_path, given):
    with pytest.raises(ConfigError, match="must be an absolute path"):
        settings(tmp_path, **given) if "out" not in given else settings("run")
