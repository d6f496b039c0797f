"""Speed of checking a run on disk: a ledger of a million participations, opened and verified.

Run: ``python benchmarks/run_checks.py``; writes benchmarks/results/run_checks.json.

10,000 rounds of 100 clients out of 50,000, a model of 100,000 parameters, a tree mechanism. The
ledger is written at once, not by 10,000 commits. "open" reads it and checks chain and signature;
"verify" is all that ``privpart verify FOLDER --public-key KEY`` does after its imports, on another
machine than the run's. Seconds are the least of three calls.
"""

import frame

import os
import tempfile
from pathlib import Path

import torch

from accounting import BinaryTree, Participation
from privpart import PrivacyPlan
from privpart.run.begin import create_run
from privpart.run.ledger import LEDGER, Ledger, Row, SigningKey, _committed, _line
from privpart.run.store import model_hash, write_state
from privpart.training.verify import check_run

CLIENTS, POPULATION, DIM = 100, 50_000, 100_000


def run_of(folder: Path, rounds: int) -> str:
    """Write a run; return its public key."""
    most, apart = -(-rounds * CLIENTS // POPULATION), POPULATION // CLIENTS
    plan = PrivacyPlan(
        mechanism=BinaryTree(rounds),
        participation=Participation(rounds, most, min(apart, rounds)),
        clip_norm=1.0,
        noise_multiplier=10.0,
        report_goal=CLIENTS,
    )
    create_run(folder, plan, facts={"delta": 1e-6}).close()
    parameters = torch.zeros(DIM)
    name = folder / f"state-{rounds:06d}.safetensors"
    state, model = write_state(name, {"parameters": parameters}, {}).state, model_hash(parameters)
    signer = SigningKey((folder / "signing-key").read_bytes())
    chain, lines = Ledger(folder)._end, []
    counts = {"state": state, "model": model, "clip_norm": 1.0, "received": CLIENTS}
    counts["clipped_by"] = {"server": CLIENTS}
    for at in range(rounds):
        clients = sorted((at * CLIENTS + i) % POPULATION for i in range(CLIENTS))
        row = Row(round=at, clients=tuple(clients), **counts)
        lines.append(_line(chain, _committed(row), signer))
        chain = b"".join(lines[-1].split(b" ")[:2]).decode()
    with (folder / LEDGER).open("ab") as file:
        file.writelines(lines)
    for key in ("key", "signing-key"):
        (folder / key).unlink()
    return signer.public_key


def main() -> None:
    given = frame.options(__doc__, "run_checks.json", quick={"rounds": 100}, rounds=10_000)
    result = frame.Result(given.result, "torch", "numpy")
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["PRIVPART_STATE_DIR"] = f"{scratch}/made"
        folder = Path(scratch) / "run"
        key = run_of(folder, given.rounds)
        os.environ["PRIVPART_STATE_DIR"] = f"{scratch}/elsewhere"
        path = folder / LEDGER
        wrong = [c for c in check_run(folder, public_key=key) if c.status == "wrong"]
        if wrong:
            raise SystemExit(f"not what was meant to be measured: {wrong}")
        jobs = {
            "open": lambda: Ledger(folder).rows(),
            "verify": lambda: check_run(folder, public_key=key),
        }
        parts = {"bytes": path.stat().st_size}
        for name, times in frame.in_turns(jobs, 3, warm=False).items():
            least = zip(frame.Seconds._fields, map(min, zip(*times, strict=True)), strict=True)
            parts[name] = {clock: round(value, 2) for clock, value in least}
    frame.show("ledger", parts)
    result.write(**parts)


if __name__ == "__main__":
    main()
