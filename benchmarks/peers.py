"""Peers: rounds of the engine compared with pfl-research and Flower's simulation.

Run: ``python benchmarks/peers.py --peers pfl flower --rounds 5``; writes results/peers.json. The
first run creates an environment for each peer under .peers/ (2.5 GB); the result names the reason
for a peer that cannot be installed or run. ``--no-two-threads`` leaves out the sides of one process
and two threads, which take minutes on a busy machine.

All sides run concurrently and take turns at rounds of the same work: FedPT's EMNIST network on
Fashion-MNIST, 20 clients of 100 images, one epoch of batches of 16, SGD 0.05, every update clipped
to 1 and summed. The script checks that the work is the same, see ``SAME``.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_cases import CASES, Case, Plain
from engine_speed import Engine, turn
from machine import machine
from peers_environment import Environment, NotInstalledError, environment
from peers_process import DiedError, Peer
from peers_work import expected_sum, read

from privpart import Users
from privpart.data.tasks import Task, fashion_mnist

RESULT = Path(__file__).parent / "results" / "peers.json"
OURS = "privpart engine, 2 workers x 1 thread"
PEER_DISTANCE = 0.01
NORM_TOLERANCE = 0.1
SAME = {
    "peers": "the first round's sum of clipped updates is nearer to the one that a plain loop in "
    f"the same order of examples computes than {PEER_DISTANCE} of its norm (relative_distance); "
    "the names and shapes of all parameters are ours, or loading the start would have failed",
    "ours": "our sides shuffle the examples, so that the sum is another one by about a third of "
    f"its norm; its norm is within {NORM_TOLERANCE:.0%} of the same plain loop's",
}
NOT_EQUAL = [
    "Our sides and the plain loop shuffle each client's examples; pfl, by design of its dataset, "
    "and our Flower client take them in the stored order, which spares them the gather.",
    "A round of a peer ends when its server has averaged and is ready for the next; a round of "
    "ours and of the plain loop ends with the sum, without a server's step.",
    "Flower averages new parameters weighted by the number of examples, equal here; clipping is "
    "its own fixedclipping_mod, in numpy. One simulated node is one client, as in its examples: "
    "many clients in a message would cost it less. Frozen parameters do not travel.",
    "Flower is run by flwr.simulation.run_simulation, which `flwr run` uses the backend of and "
    "which Flower calls deprecated.",
    "pfl makes a dataset object per client and round, and copies the trained parameters twice.",
    "The engine lays images out channels last where its first rounds find that faster, see "
    "engine; the peers and the plain loop leave the layout as it is.",
    "Start-up (imports, Ray, trials of methods) is in first_round_seconds in part and in no other "
    "figure.",
]


def peer_sides(name: str, env: Environment, case: Path, folder: Path) -> dict[str, Peer]:
    """Start the modes of a peer."""
    here, python = Path(__file__).parent, str(env.python)
    if name == "flower":
        label = "Flower simulation, 2 actors x 1 thread"
        command = [python, str(here / "peers_flower.py")]
        return {label: Peer(command, case, folder / "flower", str(folder / "ray"), threads=1)}
    script = str(here / "peers_pfl.py")
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return {
        "pfl, 1 process x 2 threads": Peer([python, script], case, folder / "pfl1", "2", threads=2),
        "pfl, 2 processes x 1 thread": Peer(
            [python, *ranks, script], case, folder / "pfl2", "1", threads=1
        ),
    }


def export(path: Path, case: Case, task: Task, plain: Plain) -> None:
    """Write the case for the peers: start values, trainable part, images of the cohort."""
    shape, count = (case.clients, case.examples), case.clients * case.examples
    parameters = dict(plain.module.named_parameters())
    trained = [n for n, p in parameters.items() if any(p is q for q in plain.trained)]
    np.savez(
        path,
        x=task.train_x[:count].reshape(*shape, *task.train_x.shape[1:]).numpy(),
        y=task.train_y[:count].reshape(shape).numpy(),
        rate=case.rate,
        trained=np.array(trained),
        **{name: p.detach().numpy() for name, p in parameters.items()},
    )


def measure(
    case: Case,
    task: Task,
    environments: dict[str, Environment],
    rounds: int,
    folder: Path,
    two_threads: bool,
) -> dict[str, Any]:
    """Measure all sides of a case in turns."""
    clients = range(case.clients)
    rows = torch.arange(case.clients * case.examples).split(case.examples)
    users = Users(task.train_x, task.train_y, rows)
    plain = Plain(case, users, clients, threads=2)
    export(folder / "case.npz", case, task, plain)
    work = read(folder / "case.npz")
    reference = torch.cat([t.flatten() for t in expected_sum(work).values()])
    sides: dict[str, Any] = {
        "plain loop, 1 thread": Plain(case, users, clients),
        "plain loop, 2 threads": plain,
        OURS: Engine(case, users, workers=2),
    }
    for name, env in environments.items():
        sides |= peer_sides(name, env, folder / "case.npz", folder)
    left_out = {}
    for name in [n for n in sides if "2 threads" in n and not two_threads]:
        left_out[name] = "not asked for: --no-two-threads"
        sides.pop(name).close()
    try:
        return _in_turns(sides, reference, rounds, left_out) | {
            "parameters": sum(p.numel() for p in work.module.parameters()),
            "trained_parameters": len(reference),
        }
    finally:
        for side in sides.values():
            side.close()


def _in_turns(
    sides: dict[str, Any], reference: torch.Tensor, rounds: int, left_out: dict[str, str]
) -> dict[str, Any]:
    started: dict[str, dict[str, float]] = {}
    wall: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}

    def begin(name: str, side: Any) -> None:  # noqa: ANN401
        began = time.perf_counter()
        total = side.round().double()
        started[name] = {"first_round_seconds": time.perf_counter() - began}
        started[name] |= _same_work(total, reference, isinstance(side, Peer))

    def time_one(name: str, side: Any) -> None:  # noqa: ANN401
        seconds, processors = turn(side)
        wall[name].append(seconds)
        cpu[name].append(processors)

    def each(step: Callable[[str, Any], None]) -> None:
        for name, side in list(sides.items()):
            try:
                step(name, side)
            except DiedError as error:
                if name == OURS:
                    raise
                left_out[name] = str(error)
                sides.pop(name).close()

    each(begin)
    said = list(sides[OURS].said)
    idle = _idle({name: side.cpu for name, side in sides.items()})
    for _ in range(rounds):
        each(time_one)
    table = [
        {"side": name, **_spread("wall", wall[name]), **_spread("cpu", cpu[name])}
        | {"cpu_per_second_while_it_waits": idle[name], **started[name]}
        for name in sides
    ]
    ours = next(row for row in table if row["side"] == OURS)
    ratios = {
        row["side"]: {f"of_{k}": row[f"wall_{k}"] / ours[f"wall_{k}"] for k in ("least", "median")}
        | {"cpu_of_least": row["cpu_least"] / ours["cpu_least"]}
        for row in table
        if row is not ours
    }
    return {
        "seconds_of_the_side_per_second_of_ours": ratios,
        "engine": said,
        "rows": table,
        "left_out": left_out,
    }


def _spread(name: str, values: list[float]) -> dict[str, float]:
    middle = statistics.median(values)
    return {f"{name}_least": min(values), f"{name}_median": middle, f"{name}_most": max(values)}


def _idle(cpu: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Return each side's processor seconds per second while no side has its turn."""
    time.sleep(1)
    before = {name: read_cpu() for name, read_cpu in cpu.items()}
    time.sleep(3)
    return {name: (read_cpu() - before[name]) / 3 for name, read_cpu in cpu.items()}


def _same_work(total: torch.Tensor, reference: torch.Tensor, peer: bool) -> dict[str, float]:
    """Compare a first sum with the plain loop's; see ``SAME``.

    Raises:
        DiedError: the sums differ.
    """
    if total.shape != reference.shape:
        raise DiedError(f"not the same work: {len(total)} trained parameters")
    norm, expected = float(total.norm()), float(reference.norm())
    distance = float((total - reference).norm()) / expected
    wrong = distance > PEER_DISTANCE if peer else abs(norm / expected - 1) > NORM_TOLERANCE
    if not np.isfinite(distance) or wrong:
        raise DiedError(f"not the same work: norm {norm} for {expected}, distance {distance}")
    return {"sum_norm": norm, "expected_norm": expected, "relative_distance": distance}


def main() -> None:
    """Write the results and print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", nargs="*", default=["pfl", "flower"], choices=["pfl", "flower"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--two-threads", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    peers: dict[str, Any] = {}
    environments: dict[str, Environment] = {}
    for name in options.peers:
        try:
            environments[name] = environment(name)
            peers[name] = {
                "versions": environments[name].versions,
                "note": environments[name].note,
            }
        except NotInstalledError as error:
            peers[name] = {"left_out": f"not installed: {error}"}
        print(name, peers[name], flush=True)
    task, load, cases = fashion_mnist(), os.getloadavg()[0], {}
    for name in ("EMNIST CNN, full", "EMNIST CNN, partial"):
        with tempfile.TemporaryDirectory(prefix="peers") as folder:
            cases[name] = measure(
                CASES[name], task, environments, options.rounds, Path(folder), options.two_threads
            )
        for row in cases[name]["rows"]:
            print(name, "|", row["side"], {k: round(v, 3) for k, v in row.items() if k != "side"})
        print(name, cases[name]["left_out"], flush=True)
        _write(options.result, options.rounds, load, peers, cases)


def method(rounds: int) -> dict[str, Any]:
    """Return a description of the measurement and of the differences between the sides."""
    return {
        "seconds": f"least, median and most of {rounds} turns of each side, all in one run; a "
        "turn is half a second of rounds, one at least, after one that is not counted; cpu is "
        "the processor seconds of all processes of the side",
        "load": "load_before and load_average, on so many cores, say how shared the machine "
        "was. Threads of one process wait for each other on a busy machine, "
        "to half a minute and more a round at a load of ten on two cores: there only the others "
        "compare, and least and cpu say more than median and most",
        "same_work": SAME,
        "not_equal": NOT_EQUAL,
    }


def _write(
    path: Path, rounds: int, load: float, peers: dict[str, Any], cases: dict[str, Any]
) -> None:
    document = {
        "method": method(rounds),
        "machine": machine("torch") | {"threads": "as each row says", "load_before": load},
        "peers": peers,
        "cases": cases,
    }
    path.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
