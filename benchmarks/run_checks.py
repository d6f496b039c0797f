"""Speed of checking a run on disk: a ledger of a million participations, opened and verified.

Run: ``python benchmarks/run_checks.py``; writes benchmarks/results/run_checks.json.

10,000 rounds of 100 clients out of 50,000, a model of 100,000 parameters, a tree mechanism. The
ledger is written at once, not by 10,000 commits. "open" reads it and checks chain and signature;
"verify" is all that ``privpart verify FOLDER --public-key KEY`` does after its imports, on another
machine than the run's.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import torch
from accounting_speed import machine  # sets one thread, before torch loads

from accounting import BinaryTree, Participation
from privpart import PrivacyPlan, RunFolder
from privpart.run.identity import SigningKey, model_hash
from privpart.run.ledger import Ledger, next_row
from privpart.run.store import write_state
from privpart.run.verify import check_run

RESULT = Path(__file__).parent / "results" / "run_checks.json"
ROUNDS, CLIENTS, POPULATION, DIM = 10_000, 100, 50_000, 100_000
REPEATS = 3


def run_of(folder: Path) -> str:
    """Write a run of ROUNDS rounds; return its public key."""
    plan = PrivacyPlan(
        mechanism=BinaryTree(ROUNDS),
        participation=Participation(ROUNDS, ROUNDS * CLIENTS // POPULATION, POPULATION // CLIENTS),
        clip_norm=1.0,
        noise_multiplier=10.0,
        report_goal=CLIENTS,
    )
    RunFolder.create(folder, plan, facts={"delta": 1e-6}).close()
    parameters = torch.zeros(DIM)
    name = folder / f"state-{ROUNDS:06d}.safetensors"
    state, model = write_state(name, {"parameters": parameters}, {}), model_hash(parameters)
    signer = SigningKey((folder / "signing-key").read_bytes())
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.signer = signer
    chain = ledger.facts["genesis"]
    with ledger._transaction() as db:
        for round_ in range(ROUNDS):
            clients = sorted((round_ * CLIENTS + i) % POPULATION for i in range(CLIENTS))
            row = next_row(
                chain,
                round_=round_,
                state=state,
                model=model,
                clip_norm=1.0,
                received=CLIENTS,
                clients=clients,
            )
            chain = row.chain
            db.execute("INSERT INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?, ?)", astuple(row))
            db.executemany(
                "INSERT INTO participations VALUES (?, ?)", [(round_, c) for c in clients]
            )
        ledger._sign(db, ledger.facts, ROUNDS, chain, ledger._facts_hash)
    ledger.close()
    for key in ("key", "signing-key"):
        (folder / key).unlink()
    return signer.public_key


def seconds(job: Callable[[], object]) -> dict[str, float]:
    """Return the least wall-clock and processor seconds of a few calls."""
    found = []
    for _ in range(REPEATS):
        wall, cpu = time.perf_counter(), time.process_time()
        job()
        found.append((time.perf_counter() - wall, time.process_time() - cpu))
    return {"wall": round(min(w for w, _ in found), 2), "cpu": round(min(c for _, c in found), 2)}


def main() -> None:
    """Measure, print, write."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["PRIVPART_STATE_DIR"] = f"{scratch}/made"
        folder = Path(scratch) / "run"
        key = run_of(folder)
        os.environ["PRIVPART_STATE_DIR"] = f"{scratch}/elsewhere"
        path = folder / "ledger.sqlite"
        wrong = [c for c in check_run(folder, public_key=key) if c.status == "wrong"]
        if wrong:
            raise SystemExit(f"not what was meant to be measured: {wrong}")
        found = {
            "bytes": path.stat().st_size,
            "open": seconds(lambda: Ledger(path, read_only=True).rows()),
            "verify": seconds(lambda: check_run(folder, public_key=key)),
        }
    print(json.dumps(found, indent=2))
    RESULT.write_text(json.dumps({"machine": machine(), **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
