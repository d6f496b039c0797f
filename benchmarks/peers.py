"""Peers: rounds of the engine compared with pfl-research and Flower's simulation.

Run: ``python benchmarks/peers.py --peers pfl flower --rounds 5``; writes results/peers.json. The
first run creates an environment for each peer under .peers/ (2.5 GB); the result names the reason
for a peer that cannot be installed or run. ``--no-two-threads`` leaves out the sides of one process
and two threads, which take minutes on a busy machine.

All sides run concurrently and take turns at rounds of the same work: FedPT's EMNIST network on
Fashion-MNIST, 20 clients of 100 images, one epoch of batches of 16, SGD 0.05, every update clipped
to 1 and summed. The script checks that the work is the same, see ``SAME``.
"""

import frame

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_cases import CASES, Case, Plain
from engine_speed import TURN, Engine
from peers_environment import Environment, NotInstalledError, environment
from peers_process import DiedError, Peer
from peers_work import expected_sum, read

from privpart import Users
from privpart.data.tasks import Task, fashion_mnist

OURS = "privpart engine, 2 workers x 1 thread"
PEERS = ("pfl", "flower")
PEER_DISTANCE = 0.01
NORM_TOLERANCE = 0.1
METHOD = {
    "seconds": "least, median and most of the turns of each side, all in one run; a turn is half a "
    "second of rounds, one at least, after one that is not counted; cpu is the processor seconds "
    "of all processes of the side",
    "load": "load_before and load_average, on so many cores, say how shared the machine was. "
    "Threads of one process wait for each other on a busy machine, to half a minute and more a "
    "round at a load of ten on two cores: there only the others compare, and least and cpu say "
    "more than median and most",
    "same_work": {
        "peers": "the first round's sum of clipped updates is nearer to the one that a plain loop "
        f"in the same order of examples computes than {PEER_DISTANCE} of its norm "
        "(relative_distance); the names and shapes of all parameters are ours, or loading the "
        "start would have failed",
        "ours": "our sides shuffle the examples, so that the sum is another one by about a third "
        f"of its norm; its norm is within {NORM_TOLERANCE:.0%} of the same plain loop's",
    },
    "not_equal": [
        "Our sides and the plain loop shuffle each client's examples; pfl, by design of its "
        "dataset, and our Flower client take them in the stored order, which spares them the "
        "gather.",
        "A round of a peer ends when its server has averaged and is ready for the next; a round "
        "of ours and of the plain loop ends with the sum, without a server's step.",
        "Flower averages new parameters weighted by the number of examples, equal here; clipping "
        "is its own fixedclipping_mod, in numpy. One simulated node is one client, as in its "
        "examples: many clients in a message would cost it less. Frozen parameters do not travel.",
        "Flower is run by flwr.simulation.run_simulation, which `flwr run` uses the backend of "
        "and which Flower calls deprecated.",
        "pfl makes a dataset object per client and round, and copies the trained parameters twice.",
        "The engine lays images out channels last where its first rounds find that faster, see "
        "engine; the peers and the plain loop leave the layout as it is.",
        "Start-up (imports, Ray, trials of methods) is in first_round_seconds in part and in no "
        "other figure.",
    ],
}


def peer_sides(name: str, env: Environment, case: Path, folder: Path) -> dict[str, Peer]:
    """Start the modes of a peer."""
    python, script = str(env.python), str(Path(__file__).parent / f"peers_{name}.py")
    if name == "flower":
        label = "Flower simulation, 2 actors x 1 thread"
        own = folder / "flower"
        return {label: Peer([python, script], case, own, str(folder / "ray"), threads=1)}
    ranks = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", script]
    one = Peer([python, script], case, folder / "pfl1", "2", threads=2)
    two = Peer(ranks, case, folder / "pfl2", "1", threads=1)
    return {"pfl, 1 process x 2 threads": one, "pfl, 2 processes x 1 thread": two}


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
    case: Case, task: Task, environments: dict[str, Environment], rounds: int, two_threads: bool
) -> dict[str, Any]:
    """Measure all sides of a case in turns."""
    rows = torch.arange(case.clients * case.examples).split(case.examples)
    users, clients = Users(task.train_x, task.train_y, rows), range(case.clients)
    plain = Plain(case, users, clients, threads=2)
    sides: dict[str, Any] = {
        "plain loop, 1 thread": Plain(case, users, clients),
        "plain loop, 2 threads": plain,
        OURS: Engine(case, users, workers=2),
    }
    with tempfile.TemporaryDirectory(prefix="peers") as scratch:
        path = Path(scratch) / "case.npz"
        export(path, case, task, plain)
        work = read(path)
        for name, env in environments.items():
            sides |= peer_sides(name, env, path, Path(scratch))
        left_out = {}
        for name in [n for n in sides if "2 threads" in n and not two_threads]:
            left_out[name] = "not asked for: --no-two-threads"
            sides.pop(name).close()
        try:
            reference = expected_sum(work)
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
    times: dict[str, list[frame.Seconds]] = {name: [] for name in sides}

    def begin(name: str, side: Any) -> None:
        began = time.perf_counter()
        total = side.round().double()
        started[name] = {"first_round_seconds": time.perf_counter() - began}
        started[name] |= _same_work(total, reference, isinstance(side, Peer))

    def time_one(name: str, side: Any) -> None:
        times[name].append(frame.seconds(side.round, clock=side.cpu, at_least=TURN))

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
    method = str(sides[OURS].engine.method)
    idle = _idle({name: side.cpu for name, side in sides.items()})
    for _ in range(rounds):
        each(time_one)
    rows = {name: frame.spreads(times[name]) for name in sides}
    ratios = {
        name: {f"of_{k}": row[f"wall_{k}"] / rows[OURS][f"wall_{k}"] for k in ("least", "median")}
        | {"cpu_of_least": row["cpu_least"] / rows[OURS]["cpu_least"]}
        for name, row in rows.items()
        if name != OURS
    }
    return {
        "seconds_of_the_side_per_second_of_ours": ratios,
        "engine": method,
        "rows": [
            {"side": name, **row, "cpu_per_second_while_it_waits": idle[name], **started[name]}
            for name, row in rows.items()
        ],
        "left_out": left_out,
    }


def _idle(cpu: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Return each side's processor seconds per second while no side has its turn."""
    time.sleep(1)
    before = {name: read_cpu() for name, read_cpu in cpu.items()}
    time.sleep(3)
    return {name: (read_cpu() - before[name]) / 3 for name, read_cpu in cpu.items()}


def _same_work(total: torch.Tensor, reference: torch.Tensor, peer: bool) -> dict[str, float]:
    """Compare a first sum with the plain loop's; see ``METHOD``.

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
    given = frame.options(
        __doc__,
        "peers.json",
        quick={"rounds": 1, "peers": [], "two_threads": False},
        peers=frame.among(PEERS),
        rounds=5,
        two_threads=True,
    )
    torch.set_num_threads(1)
    about = {"threads": "as each row says", "load_before": os.getloadavg()[0]}
    result = frame.Result(given.result, "torch", **about)
    peers: dict[str, Any] = {}
    environments: dict[str, Environment] = {}
    for name in given.peers:
        try:
            env = environments[name] = environment(name)
            peers[name] = {"versions": env.versions, "note": env.note}
        except NotInstalledError as error:
            peers[name] = {"left_out": f"not installed: {error}"}
        frame.show(name, peers[name])
    task, cases = fashion_mnist(frame.DATA), {}
    for name in list(CASES)[: 1 if given.quick else 2]:
        cases[name] = measure(CASES[name], task, environments, given.rounds, given.two_threads)
        for row in cases[name]["rows"]:
            frame.show(name, row)
        frame.show(f"{name}, left out", cases[name]["left_out"])
        result.machine["load_average"] = os.getloadavg()[0]
        result.write(method=METHOD | {"rounds": given.rounds}, peers=peers, cases=cases)


if __name__ == "__main__":
    main()
