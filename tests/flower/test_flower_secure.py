"""Secure sums over Flower: the same bits, through nodes that are lost, and no key on a disk."""

import re
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="Flower has an environment of its own: make messages")

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from deployment import Deployment, DeploymentError
from flwr.app import Context, Error, Message, RecordDict
from in_process import InProcessGrid, through_bytes
from node import Node
from small import SEED, TASK, committed, plan_of, train_here, write_app

from accounting.checks import ConfigError
from privpart.flower.node import client_app
from privpart.flower.secure import read_roster
from privpart.flower.server import Settings, serve
from privpart.loop import CohortTooSmallError
from privpart.run.report import run_report

pytestmark = pytest.mark.usefixtures("fresh_code")

NODES = (3, 5, 8, 13, 2**64 - 5)
STAGES = ("keys", "shares", "vector", "signature", "unmask")
SECURE = """
[privacy.secure]
smallest_cohort = 4
largest_cohort = 5
threshold = 3
colluding = 0
"""


def write_plan(folder: Path, secure: bool = True, code: str = "task") -> Path:
    """Write a plan of two rounds, and its code; a process loads one file of each name."""
    folder.mkdir()
    (folder / f"{code}.py").write_text(TASK)
    plan = plan_of(rounds=2, clients=6).replace("\n[model]", SECURE * secure + "\n[model]")
    (folder / "plan.toml").write_text(plan.replace("./task.py", f"./{code}.py"))
    return folder / "plan.toml"


def write_party(folder: Path, number: int) -> tuple[dict[str, object], str]:
    """Write the key of a party; return its node's configuration and its line of the roster."""
    folder.mkdir(exist_ok=True)
    key, path = Ed25519PrivateKey.generate(), folder / f"{number}.pem"
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    share = {"partition-id": number, "num-partitions": len(NODES)}
    own = {"party": number, "party-key": str(path), "roster": str(folder / "roster.toml")}
    own["party-memory"] = str(folder / f"{number}.json")
    return share | own, f'{number} = "{key.public_key().public_bytes_raw().hex()}"'


class SecureGrid(InProcessGrid):
    """Nodes that start anew for every message, and keep Flower's context alone.

    Attributes:
        lost: (node, stage, round): where Flower says that no answer of the node will come.
        changed: changes the message of a node, by (node, stage), before it gets it.
        seen: secrets of parties, as they lay in Flower's context.
    """

    def __init__(self, plan: Path, folder: Path) -> None:
        super().__init__(dict.fromkeys(NODES))
        self.lost, self.changed, self.seen = set(), {}, []
        self._plan, self._contexts, keys = plan, {}, []
        for number, node in enumerate(NODES):
            config, line = write_party(folder, number)
            keys.append(line)
            self._contexts[node] = Context(1, node, config, RecordDict(), {})
        self.roster = folder / "roster.toml"
        self.roster.write_text("[parties]\n" + "\n".join(keys))

    def config(self, node):
        return self._contexts[node].node_config

    def _answer(self, message):
        node = message.metadata.dst_node_id
        fields = message.content["task"]
        stage = fields.get("stage")
        if (node, stage, fields.get("round")) in self.lost:
            return through_bytes(Message(Error(3, "expired"), reply_to=message))
        change = self.changed.get((node, stage))
        if change:
            change(message.content)
        reply = through_bytes(client_app(self._plan)(message, self._contexts[node]))
        self.seen += [r["secrets"] for r in self._contexts[node].state.values() if "secrets" in r]
        return reply


def run(tmp_path, lost=(), changed=None, prepare=lambda grid: None, grid_of=SecureGrid, **settings):
    plan = tmp_path / "plan" / "plan.toml"
    if not plan.exists():
        write_plan(tmp_path / "plan")
    grid, said = grid_of(plan, tmp_path / "keys"), []
    grid.lost, grid.changed = set(lost), changed or {}
    prepare(grid)
    given = {"out": str(tmp_path / "run"), "nodes": 5, "authenticated": True, "timeout": 600.0}
    given |= {"seed": 3, "attempts": 1, "roster": str(grid.roster)}
    serve(grid, plan, Settings(**given | settings), poll=0.01, report=said.append)
    return grid, said


def released(path: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    (state,) = path.glob("state-*.safetensors")
    return load_file(state)["parameters"]


@pytest.fixture(scope="module")
def clear(tmp_path_factory):
    """The models of the same plan in the clear, by the nodes that are lost from the start."""
    found = {}

    def of(lost):
        if lost not in found:
            folder = tmp_path_factory.mktemp("clear")
            plan = write_plan(folder / "plan", secure=False, code=f"clear{len(found)}")
            grid = InProcessGrid({node: client_app(plan) for node in NODES})
            plain = grid._answer
            grid._answer = lambda message: (
                through_bytes(Message(Error(3, "expired"), reply_to=message))
                if message.metadata.dst_node_id in lost and "clients" in message.content["task"]
                else plain(message)
            )
            given = {"nodes": 5, "authenticated": True, "timeout": 600.0, "seed": 3, "attempts": 1}
            serve(grid, plan, Settings(out=str(folder / "run"), **given), poll=0.01)
            found[lost] = released(folder / "run")
        return found[lost]

    return of


@pytest.mark.parametrize("stage", ["", *STAGES])
def test_the_model_is_the_one_in_the_clear_whenever_a_node_is_lost(tmp_path, clear, stage):
    """It is back in the next round, and lost again: lists may not differ by one party."""
    grid, said = run(tmp_path, lost=[(NODES[2], stage, round_) for round_ in (0, 1)])
    without = stage in ("keys", "shares", "vector")
    assert torch.equal(released(tmp_path / "run"), clear((NODES[2],) if without else ()))
    assert not [line for line in said if "refused" in line]
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert grid.seen
    for secrets in grid.seen:
        for secret in (secrets[:32], secrets[32:64], secrets[64:96]):
            shapes = secret, secret.hex().encode()
            assert not any(shape in content for shape in shapes for content in files)


@pytest.mark.parametrize("stage", STAGES)
def test_below_the_threshold_a_round_releases_nothing(tmp_path, stage):
    with pytest.raises(CohortTooSmallError):
        run(tmp_path, lost=[(NODES[2], stage, 0), (NODES[4], stage, 0)])
    assert not list((tmp_path / "run").glob("state-*1*"))


def test_a_node_declines_a_message_that_was_changed_and_the_others_go_on(tmp_path, clear):
    def swap(content):
        array = content["secure"]["message"]
        array.data = array.data[:-1] + bytes([array.data[-1] ^ 1])

    _, said = run(tmp_path, changed={(NODES[2], "shares"): swap})
    assert torch.equal(released(tmp_path / "run"), clear((NODES[2],)))
    why = r"node 8, shares: declined: keys: party 4 did not sign these keys"
    assert re.search(why, " ".join(said))


def test_a_node_that_gets_another_model_than_the_others_sends_nothing(tmp_path, clear):
    """Models made for one node, or for all others, would show its update as the sum."""
    import numpy as np
    from flwr.app import Array

    def other_model(content):
        start = content["model"]["trainable"].numpy()
        content["model"]["trainable"] = Array(np.zeros_like(start))

    def other_hash(content):
        content["task"]["start"] = 64 * "0"

    node, without = NODES[2], clear((NODES[2],))
    _, said = run(tmp_path, changed={(node, "vector"): other_model})
    assert torch.equal(released(tmp_path / "run"), without)
    assert "another start than the one that all parties agreed on" in " ".join(said)
    second = tmp_path / "second"
    second.mkdir()
    (second / "plan").symlink_to(tmp_path / "plan")
    _, said = run(second, changed={(node, "keys"): other_hash})
    assert torch.equal(released(second / "run"), without)
    assert "node 8: advertise: belongs to another plan" in " ".join(said)


def test_a_node_that_says_that_it_is_another_party_is_lost(tmp_path):
    def pretend(grid):
        twin = grid._contexts[NODES[4]].node_config
        twin.update({name: grid.config(NODES[3])[name] for name in ("party", "party-key")})

    _, said = run(tmp_path, prepare=pretend)
    assert "says that it is party 3, as another does" in " ".join(said)


def test_a_node_that_says_first_that_it_is_another_party_takes_nobodys_place(tmp_path, clear):
    class Liar(SecureGrid):
        def _answer(self, message):
            reply, asked = super()._answer(message), message.content["task"].get("stage")
            if message.metadata.dst_node_id == NODES[0] and asked == "keys":
                array = reply.content["secure"]["message"]
                array.data = array.data[:37] + (3).to_bytes(8) + array.data[45:]
            return reply

    _, said = run(tmp_path, grid_of=Liar)
    assert torch.equal(released(tmp_path / "run"), clear((NODES[0],)))
    assert "node 3: keys: party 3 did not sign these keys" in " ".join(said)


def test_nodes_of_a_plan_with_secure_sums_send_no_update(tmp_path):
    def ask(content):
        content["task"]["stage"] = "train"

    _, said = run(tmp_path, changed={(NODES[2], "vector"): ask})
    assert "the server asks for train, which is no stage" in " ".join(said)


def test_the_report_says_what_the_server_saw(tmp_path):
    run(tmp_path, seed=None)
    report = run_report(tmp_path / "run")
    assert report.server_saw.startswith("sums of at least 4 parties, asserted")
    assert not report.deviations


@pytest.mark.parametrize(
    "text",
    ["", "[parties]", '[parties]\n1 = "00"', "[parties]\n1 = 7", 'parties = "x"',
     f'[parties]\n1 = "{32 * "00"}"\n2 = "{32 * "00"}"',
     f'[parties]\n1 = "{32 * "00"}"\n01 = "{32 * "01"}"'],
)  # fmt: skip
def test_a_roster_that_is_not_one_is_refused(tmp_path, text):
    path = tmp_path / "roster.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="must have a table"):
        read_roster(path)


def test_a_roster_goes_with_secure_sums_alone(tmp_path):
    given = {"out": str(tmp_path / "run"), "nodes": 5, "authenticated": True}
    for secure, roster in ((True, None), (False, "/roster.toml")):
        plan = write_plan(tmp_path / f"plan-{secure}", secure=secure)
        with pytest.raises(ConfigError, match=r"roster: goes with \[privacy.secure\]"):
            serve(None, plan, Settings(**given, roster=roster))


def test_a_round_without_one_node_of_the_last_one_is_refused_by_the_others(tmp_path):
    with pytest.raises(CohortTooSmallError, match="round 1"):
        run(tmp_path, lost=[(NODES[2], "keys", 1)])
    assert len(list((tmp_path / "run").glob("state-*1.safetensors"))) == 1


def test_a_node_gives_no_second_vector_of_an_attempt_if_flower_lost_its_context(tmp_path):
    """Flower sends an answer before it keeps the context; two vectors would have the same masks."""
    declined = []

    class Lossy(SecureGrid):
        def _answer(self, message):
            fields, context = message.content["task"], self._contexts[NODES[2]]
            asked = message.metadata.dst_node_id, fields.get("stage")
            if asked != (NODES[2], "vector"):
                return super()._answer(message)
            kept = context.state["privpart-secure"]
            reply = super()._answer(message)
            context.state["privpart-secure"] = kept
            second = super()._answer(message).content["declined"]["why"]
            assert "another stage" in second
            declined.append(second)
            return reply

    run(tmp_path, grid_of=Lossy)
    assert len(declined) == 2


def test_another_run_of_a_server_gets_no_second_sum_of_a_round(tmp_path):
    """Flower has a new context for each run; the file alone knows of the lists that were signed."""

    def keeps_a_ledger(grid):
        for node in NODES:
            grid.config(node)["ledger"] = str(tmp_path / f"ledger of {node}")

    grid, _ = run(tmp_path, prepare=keeps_a_ledger)
    for node, context in grid._contexts.items():
        grid._contexts[node] = Context(2, node, context.node_config, RecordDict(), {})
    said, plan = [], tmp_path / "plan" / "plan.toml"
    given = {"nodes": 5, "authenticated": True, "timeout": 600.0, "attempts": 1, "seed": 4}
    settings = Settings(out=str(tmp_path / "again"), roster=str(grid.roster), **given)
    with pytest.raises(CohortTooSmallError):
        serve(grid, plan, settings, poll=0.01, report=said.append)
    assert len([line for line in said if "declines: it answered this round" in line]) == len(NODES)
    for node in NODES:
        del grid.config(node)["ledger"]
    with pytest.raises(CohortTooSmallError):
        serve(grid, plan, settings, poll=0.01, report=said.append)
    assert len([line for line in said if "was begun before" in line]) == len(NODES)
    memory = Path(grid.config(NODES[0])["party-memory"])
    assert memory.stat().st_mode & 0o777 == 0o600
    memory.write_text("{")
    with pytest.raises(CohortTooSmallError):
        serve(grid, plan, settings, poll=0.01, report=said.append)
    assert any("see the log of the node" in line for line in said)


@pytest.mark.slow
def test_kills_of_the_server_app_and_of_nodes_lose_nothing(tmp_path):
    """A real SuperLink, over TLS: the ServerApp is killed at two stages, a node falls silent."""
    out, names = tmp_path / "run", ("north", "east", "south", "west", "middle")
    plan = plan_of(rounds=2, clients=6)
    app = tmp_path / "app"
    given = {"seed": SEED, "timeout": 90.0, "nodes": 5}
    roster = tmp_path / "keys" / "roster.toml"
    secure = plan.replace("\n[model]", SECURE + "\n[model]")
    write_app(app, out, secure, "summed", roster=f'"{roster}"', **given)
    write_app(tmp_path / "clear", out, plan, "alone", **given)
    kills = {("vector", 0), ("signature", 1)}
    silent = {("unmask", 0)}
    parties = [write_party(tmp_path / "keys", number) for number in range(len(names))]
    roster.write_text("[parties]\n" + "\n".join(line for _, line in parties))
    with Deployment(tmp_path / "deployment") as deployed, ExitStack() as stack:
        deployed.start_superlink()
        deployed.register(*names)

        def answer(name):
            def act(message, context):
                fields = message.content["task"]
                when = fields.get("stage"), fields.get("round")
                if name == "west" and when in kills:
                    kills.remove(when)
                    with suppress(DeploymentError):
                        deployed.kill_server_app()
                    return []
                if name == "south" and when in silent:
                    return []
                return [client_app(app / "plan.toml")(message, context)]

            return act

        for name, (config, _) in zip(names, parties, strict=True):
            fields = {key.replace("-", "_"): value for key, value in config.items()}
            stack.enter_context(Node(deployed, name, answer(name), **fields))
        for left in (1, 0):
            first = deployed.submit(app)
            deployed.wait_in(first, lambda left=left: len(kills) == left, "a kill")
            deployed.wait_for(lambda: not deployed.server_app(), "the ServerApp ends")
        assert committed(out) == 1
        last = deployed.submit(app)
        assert deployed.result(last) == "finished:completed", deployed.said(last)
    assert torch.equal(released(out), train_here(tmp_path / "clear", SEED))
