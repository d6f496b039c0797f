"""Flower beside the embedded engine: processor and wall time of a round, bytes, and memory.

Run, after ``make messages``: ``.flower/bin/python benchmarks/flower.py [--parts ...] [--sizes
...]``; writes benchmarks/results/flower.json, and keeps what a run does not measure. Flower's
simulation needs Ray, which ``make`` does not install; without it that row is left out, and the run
says so:

    .flower/bin/python -m pip install -c constraints-flower.txt ray==2.55.1

    rounds    two nodes and four clients a round, with all 10^4 or 10^7 parameters trained: one
              process (deterministic, as the nodes are), a deployment with TLS and authentication,
              and Flower's own simulation
    bytes     the messages of a round, and for 10^4 parameters what goes through the wires of both
              nodes, TLS and polling included, with all parameters trained and with the last layer
              alone, beside ``privpart costs``
    fedavg    processor seconds of a round beside those of Flower's own FedAvg, which trains the
              same model on the same examples with as many steps: a process per message and one
              worker per node, in ``--turns`` turns
    users     start and a round over Flower's messages in one process: 10^6 users of whom 1,000 are
              asked, and four clients with each size
    memory    resident size of the ServerApp over 200 rounds; the nodes are threads, because a
              SuperNode starts a process per message

Times are from the commit of the first round to that of the last; processor time is that of all
processes, of the SuperLink and the nodes too. Spread is that of the rounds. Under
"measured" each part has its commit and the load of the machine.
"""
# ruff: noqa: E402

import frame

import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count, pairwise
from pathlib import Path
from typing import Any

frame.needs("flwr", "make messages, then .flower/bin/python benchmarks/flower.py")
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "flower"))
from deployment import Deployment, Proxy
from small import write_app

ROUNDS, MANY = 4, 200
NUMBERS = count()
RAY = "pip install -c constraints-flower.txt ray==2.55.1"
SIZES = {"1e4": (100, 90), "1e7": (1000, 9890), "1e8": (10000, 9990)}
"""Inputs and hidden units of the network."""

PLAN = """\
schema = "privpart/plan/1"

[privacy]
rounds = {rounds}
clip_norm = 0.5
noise_multiplier = 1.5
delta = 1e-3
max_participations = {rounds}
min_separation = 1
minimum_cohort = 3
mechanism = {{ name = "tree" }}

[model]
factory = "./task.py:network"
sizes = {{ inputs = {inputs}, hidden = {hidden} }}
train = ["{train}"]
seed = 3
keep = []

[data]
clients = "./task.py:clients"
options = {{ inputs = {inputs} }}
clients_per_round = 4
seed = 0

[client]
learning_rate = 0.1
epochs = 1
batch_size = 8

[server]
learning_rate = 0.5
"""
TASK = '''\
"""Random points of eight clients, and a network of two layers."""

import torch
from privpart.data import Users
from torch import nn


class Network(nn.Module):
    def __init__(self, inputs, hidden):
        super().__init__()
        self.body = nn.Linear(inputs, hidden)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def network(inputs, hidden):
    return Network(inputs, hidden)


def clients(inputs):
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(64, inputs, generator=draws)
    y = torch.randint(10, (64,), generator=draws)
    return Users(x, y, torch.split(torch.arange(64), 8))
'''
SERVER = '''\
"""The ServerApp of the plan; it notes each commit and its own memory."""

import json
import time
from pathlib import Path

from flwr.serverapp import ServerApp
from privpart.flower.server import Settings, serve


def note(record):
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    with Path("NOTES").open("a") as notes:
        notes.write(json.dumps([record.round, time.time(), resident]) + "\\n")


app = ServerApp()


@app.main()
def main(grid, context):
    settings = Settings(**context.run_config)
    serve(grid, Path(__file__).parent / "plan.toml", settings, callbacks=[note], poll=POLL)
'''


FEDAVG = {
    # without an import of privpart
    "plain": TASK.replace("from privpart.data import Users\n", "").replace(
        "Users(x, y, torch.split(torch.arange(64), 8))", "x, y"
    ),
    "server_app": '''\
"""Flower's FedAvg, which notes the end of each round."""

import json
import time
from pathlib import Path

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from plain import network


class Noting(FedAvg):
    def aggregate_train(self, server_round, replies):
        result = super().aggregate_train(server_round, replies)
        with Path("NOTES").open("a") as notes:
            notes.write(json.dumps([server_round, time.time(), 0]) + "\\n")
        return result


app = ServerApp()


@app.main()
def main(grid, context):
    start = ArrayRecord(network(INPUTS, HIDDEN).state_dict())
    strategy = Noting(fraction_evaluate=0.0, min_available_nodes=2)
    strategy.start(grid, start, num_rounds=ROUNDS)
''',
    "client_app": '''\
"""A node of FedAvg: two steps on the examples of two of its four clients."""

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from plain import clients, network

app = ClientApp()


@app.train()
def train(message, context):
    torch.set_num_threads(1)
    (examples, labels), module = clients(INPUTS), network(INPUTS, HIDDEN)
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for user in (0, 1):
        own = slice(8 * (4 * context.node_config["partition-id"] + user), None)
        x, y = examples[own][:8], labels[own][:8]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": 16})
    content = {"arrays": ArrayRecord(module.state_dict()), "metrics": metrics}
    return Message(RecordDict(content), reply_to=message)
''',
}


def alone(plan: str, out: str) -> list[tuple[float, float]]:
    """Train a plan in this process; return time and processor seconds at each commit."""
    from privpart import train

    times: list[tuple[float, float]] = []

    def note(_: object) -> None:
        times.append((time.time(), time.process_time() + frame.children()))

    train(plan=plan, out=out, seed=7, progress=False, callbacks=[note])
    return times


class Training:
    """An app in a folder of its own, and what its ServerApp notes."""

    def __init__(
        self, size: str, train: str = "*", rounds: int = ROUNDS, poll: float = 3.0
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="privpart-flower-"))
        os.environ["PRIVPART_STATE_DIR"] = str(self.folder / "state")
        inputs, hidden = SIZES[size]
        plan = PLAN.format(inputs=inputs, hidden=hidden, train=train, rounds=rounds)
        task = f"task{next(NUMBERS)}.py"  # one process has one module of a name
        self.out, self.notes = self.folder / "run", self.folder / "notes"
        settings = {"seed": 7, "authenticated": "true"}
        (self.folder / "app").mkdir()
        (self.folder / "app" / task).write_text(TASK)
        plan = plan.replace("task.py", task)
        self.app = write_app(self.folder / "app", self.out, plan, **settings)
        text = SERVER.replace("NOTES", str(self.notes)).replace("POLL", str(poll))
        (self.app / "server_app.py").write_text(text)

    def noted(self) -> list[list[float]]:
        """Return round, time and resident bytes of each commit."""
        if not self.notes.exists():
            return []
        return [json.loads(line) for line in self.notes.read_text().splitlines() if line]


def ticks(deployment: Deployment) -> float:
    """Return the processor seconds of all processes of a deployment, and of those they had."""
    total = 0
    for pid, _ in deployment.ours():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(number) for number in fields[11:15])
    return total / os.sysconf("SC_CLK_TCK")


def over(deployment: Deployment, run: int, of: Training, rounds: int, look: Any) -> list[Any]:
    """Return what ``look`` returned when each round had been committed."""
    seen: list[Any] = []
    for number in range(rounds):
        deployment.wait_in(run, lambda at=number: len(of.noted()) > at, f"round {number}")
        seen.append(look())
    return seen


def summary(wall: list[float], cpu: list[float]) -> dict[str, float]:
    """Return seconds of a round, from the times at which rounds were committed."""
    rounds = [after - before for before, after in pairwise(wall)]
    spread = frame.spread(rounds, "wall_{}")
    return {which: round(value, 3) for which, value in spread.items()} | {
        "cpu_mean": round((cpu[-1] - cpu[0]) / (len(cpu) - 1), 3),
        "rounds": len(rounds),
    }


def embedded(size: str) -> dict[str, float]:
    """Return times of the same training in one process."""
    of = Training(size)
    times = frame.apart(alone, str(of.app / "plan.toml"), str(of.folder / "here"))
    return summary(*map(list, zip(*times, strict=True)))


class FedAvg(Training):
    """Flower's own FedAvg on the same examples, in place of the plan's app."""

    def __init__(self, size: str, rounds: int) -> None:
        super().__init__(size, rounds=rounds)
        inputs, hidden = SIZES[size]
        changes = {"NOTES": str(self.notes), "ROUNDS": str(rounds)}
        changes |= {"INPUTS": str(inputs), "HIDDEN": str(hidden)}
        for name, text in FEDAVG.items():
            words = re.compile("|".join(changes))
            chosen = words.sub(lambda word: changes[word[0]], text)
            (self.app / f"{name}.py").write_text(chosen)


def deployed(
    size: str, train: str = "*", *, of: Training | None = None, worker: bool = False
) -> dict[str, Any]:
    """Return times of a real deployment and the bytes on its wires."""
    of = of or Training(size, train)
    # a package that is installed is compiled once, not again for each message
    compiled = {"PYTHONDONTWRITEBYTECODE": ""}
    with Deployment(of.folder / "deployment", compiled) as there, ExitStack() as stack:
        there.start_superlink()
        there.register("north", "south")
        wires = [stack.enter_context(Proxy(there.port)) for _ in range(2)]
        for number, wire in enumerate(wires):
            config = f"partition-id={number} num-partitions=2"
            there.start_node(("north", "south")[number], config, wire.port, worker=worker)
        run = there.submit(of.app)

        def look() -> tuple[float, float, int]:
            return time.time(), ticks(there), sum(wire.bytes for wire in wires)

        seen = over(there, run, of, ROUNDS, look)
    wall, cpu, sent = ([one[part] for one in seen] for part in range(3))
    per_round = round((sent[-1] - sent[0]) / (ROUNDS - 1))
    return {**summary(wall, cpu), "bytes_per_round": per_round}


def simulated(size: str) -> dict[str, Any]:
    """Return times of Flower's own simulation of two nodes."""
    of = Training(size)
    with Deployment(of.folder / "deployment") as there:
        there.start_simulation()
        run = there.submit(of.app)
        until = time.monotonic() + 400
        cpu: list[float] = []
        while len(of.noted()) < ROUNDS:
            if time.monotonic() > until:
                raise SystemExit(there.said(run))
            if len(of.noted()) > len(cpu):
                cpu.append(ticks(there))
            time.sleep(0.02)
        cpu.append(ticks(there))
    return summary([one[1] for one in of.noted()], cpu)


def beside_fedavg(size: str, turns: int) -> dict[str, Any]:
    """Return processor seconds of a round of FedAvg and of the plan, measured in turns."""
    kinds = {
        f"{name}, {how}": (make, how == "worker")
        for how in ("process per message", "worker")
        for name, make in (("FedAvg", FedAvg), ("privpart", Training))
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(turns):
        names = list(kinds)
        # who is first has a machine of another temper
        for name in names[turn:] + names[:turn]:
            make, worker = kinds[name]
            found = deployed(size, of=make(size, rounds=ROUNDS), worker=worker)
            seconds[name].append(found["cpu_mean"])
            print(name, found, file=sys.stderr)
    ratios = {
        how: [
            round(own / other, 2)
            for own, other in zip(
                seconds[f"privpart, {how}"], seconds[f"FedAvg, {how}"], strict=True
            )
        ]
        for how in ("process per message", "worker")
    }
    return {"CPU s a round, by turn": seconds, "privpart by FedAvg, by turn": ratios}


def promised(of: Training) -> int:
    """Return the bytes of a round by ``privpart costs``: to two nodes, from four clients."""
    command = ["costs", "--plan", str(of.app / "plan.toml"), "--format", "json"]
    line = [sys.executable, "-c", "from privpart.cli.main import main; main()", *command]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout)["rows"][-1]
    return 2 * int(row["bytes_down"]) + 4 * int(row["bytes_up"])


def messages(size: str, train: str) -> dict[str, int]:
    """Return the bytes of the messages of a round, as Flower sends them, and by the plan."""
    from in_process import NODES, InProcessGrid

    from privpart import client_app
    from privpart.flower.server import Settings, serve

    of = Training(size, train, rounds=2)
    plan = of.app / "plan.toml"
    grid = InProcessGrid({node: client_app(plan) for node in NODES})
    sent: list[int] = []
    settings = Settings(out=str(of.out), nodes=2, authenticated=True, seed=7)
    note = [lambda _: sent.append(sum(grid.bytes.values()))]
    serve(grid, plan, settings, callbacks=note, poll=0.01)
    return {"messages": sent[1] - sent[0], "plan": promised(of)}


def one_process(size: str, users: int, asked: int) -> dict[str, Any]:
    """Return seconds, bytes and memory of start and rounds over Flower's messages, as bytes."""
    from in_process import NODES, InProcessGrid

    from privpart import client_app
    from privpart.flower.server import Settings, serve

    of = Training(size, rounds=2)
    plan, (task,) = of.app / "plan.toml", of.app.glob("task[0-9]*.py")
    # one example each
    text = task.read_text().replace("(64", f"({users}").replace("), 8)", "), 1)")
    task.write_text(text)
    chosen = plan.read_text().replace("per_round = 4", f"per_round = {asked}")
    plan.write_text(chosen.replace("delta = 1e-3", f"delta = {0.1 / users}"))
    grid = InProcessGrid({node: client_app(plan) for node in NODES})
    marks = [(time.process_time(), 0)]
    note = [lambda _: marks.append((time.process_time(), sum(grid.bytes.values())))]
    settings = Settings(out=str(of.out), nodes=2, authenticated=True, seed=7)
    serve(grid, plan, settings, callbacks=note, poll=0.01)
    (start, _), (first, _), (second, _) = marks
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "users": users,
        "asked": asked,
        "start and first round, CPU s": round(first - start, 1),
        "second round, CPU s": round(second - first, 1),
        "messages of the second round": marks[2][1] - marks[1][1],
        "peak GiB": round(peak, 1),
    }


def memory() -> dict[str, Any]:
    """Return the resident size of the ServerApp over many rounds."""
    from node import Node

    from privpart import client_app

    of = Training("1e4", rounds=MANY, poll=0.2)
    own = client_app(of.app / "plan.toml")
    with Deployment(of.folder / "deployment") as there, ExitStack() as stack:
        there.start_superlink()
        there.register("north", "south")
        for number, name in enumerate(("north", "south")):
            place = {"partition_id": number, "num_partitions": 2}
            node = Node(there, name, lambda *message: [own(*message)], **place)
            stack.enter_context(node)
        run = there.submit(of.app)
        for least in (1, *range(5, MANY + 1, 5)):
            there.wait_in(run, lambda at=least: len(of.noted()) >= at, f"{least} rounds")
    sizes = {int(one[0]) + 1: round(one[2] / 2**20, 1) for one in of.noted()}
    return {"MiB after round": {str(at): sizes[at] for at in (1, 10, 50, 100, 150, 200)}}


def sent(size: str) -> dict[str, Any]:
    """Return the bytes of a round with all parameters trained and with the last layer alone."""
    full, last = messages(size, "*"), messages(size, "head.*")
    if size == "1e4":  # a larger one would pass 240 MB a round through the wires of this script
        full["wires"] = deployed(size)["bytes_per_round"]
        last["wires"] = deployed(size, "head.*")["bytes_per_round"]
    ratio = {kind: round(full[kind] / last[kind], 2) for kind in full}
    return {"all parameters": full, "last layer": last, "ratio": ratio}


def now() -> dict[str, Any]:
    """Return the commit that runs and the load of the machine."""
    about = frame.machine()
    return {name: about[name] for name in ("commit", "load_average")}


def of_size(size: str, parts: Sequence[str], turns: int, here: dict[str, Any]) -> None:
    """Measure the wanted parts of a size."""
    if "rounds" in parts:
        here["embedded"] = embedded(size)
        here["deployment"] = deployed(size)
        if importlib.util.find_spec("ray"):
            here["simulation"] = simulated(size)
        else:
            said = f"{size}: Flower's simulation is left out, because Ray is not here;"
            print(f"{said} {sys.executable} -m {RAY}", file=sys.stderr)
    if "fedavg" in parts:
        here["beside FedAvg"] = beside_fedavg(size, turns)
    if "bytes" in parts:
        here["bytes per round"] = sent(size)
    if "users" in parts:
        few = 3 if size == "1e8" else 4  # whose answers stand in memory beside one another
        here["in one process"] = frame.apart(one_process, size, 8, few)
    if "users" in parts and size == "1e4":
        here["10^6 users"] = frame.apart(one_process, size, 10**6, 1000)


def main() -> None:
    """Measure the wanted parts, and write what was found."""
    given = frame.options(
        __doc__,
        "flower.json",
        quick={"parts": ["rounds"], "sizes": ["1e4"]},
        parts=frame.among(("rounds", "fedavg", "bytes", "users", "memory")),
        sizes=frame.among(SIZES),
        turns=3,
    )
    result = frame.Result(given.result, "cryptography", "flwr", "numpy", "torch")
    found = {name: part for name, part in result.old.items() if name != "machine"}
    for size in given.sizes:
        here = found.setdefault(f"{size} parameters", {})
        # a deployment of 10^8 would hold its models five times
        parts = [part for part in given.parts if size != "1e8" or part == "users"]
        of_size(size, parts, given.turns, here)
        here.setdefault("measured", {}).update(dict.fromkeys(parts, now()))
        frame.show(size, here)
        result.write(**found)
    if "memory" in given.parts:
        found["ServerApp over 200 rounds"] = memory() | {"measured": now()}
        frame.show("memory", found["ServerApp over 200 rounds"])
        result.write(**found)


if __name__ == "__main__":
    main()
