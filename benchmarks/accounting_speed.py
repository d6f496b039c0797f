"""Accounting speed: an exact epsilon compared with dp-accounting and Opacus on the closest task.

Run: ``python benchmarks/accounting_speed.py``; writes benchmarks/results/accounting.json.

All timings come from one run, so the ratios are meaningful on a shared machine; each is the minimum
of several repeats, in seconds.

The closest task of the other libraries is one Gaussian with the same mu: none supports a tree with
several participations (dp-accounting has a tree event with one). For Opacus it is the noise
multiplier of one step at sampling rate 1, which is the same Gaussian.
"""

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy loads

from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from machine import machine

from accounting import BinaryTree, Participation, PrivacyReport, guarantee
from accounting.report import up

RESULT = Path(__file__).parent / "results" / "accounting.json"
DELTA = 1e-6
NOISE = 4.03
TREE, ONCE = BinaryTree(1600), Participation(1600)

COLD_EXACT = (
    "from accounting import BinaryTree, Participation, guarantee; "
    "guarantee(BinaryTree(1600), Participation(1600), noise_multiplier=4.03).epsilon(1e-6)"
)
COLD_COMMAND = (
    "import sys; from privpart.cli.main import main; sys.argv[1:] = 'epsilon --rounds 1600 "
    "--noise-multiplier 4.03 --delta 1e-6'.split(); main()"
)
COLD_RDP = (
    "from dp_accounting import GaussianDpEvent; from dp_accounting.rdp import RdpAccountant; "
    "RdpAccountant().compose(GaussianDpEvent(1.215)).get_epsilon(1e-6)"
)
COLD_OPACUS = (
    "import warnings; warnings.simplefilter('ignore'); "
    "from opacus.accountants import RDPAccountant; a = RDPAccountant(); "
    "a.step(noise_multiplier=1.215, sample_rate=1.0); a.get_epsilon(delta=1e-6)"
)


def least(job: Callable[[], Any], repeats: int) -> float:
    """Return the least wall-clock time of ``job`` over ``repeats`` runs, after a warm-up run."""
    job()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return min(times)


def cold(code: str) -> float:
    """Return the least wall-clock time of a fresh interpreter that runs ``code``."""
    command = [sys.executable, "-c", code]
    return least(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), 5)


def opacus_epsilon(noise_multiplier: float) -> float:
    """Return Opacus's RDP epsilon of one unsampled step."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.step(noise_multiplier=noise_multiplier, sample_rate=1.0)
    return float(accountant.get_epsilon(delta=DELTA))


def measure() -> dict[str, dict[str, float | None]]:
    """Return the time of every job and, where it has one, its epsilon."""
    run = guarantee(TREE, ONCE, noise_multiplier=NOISE)
    sigma = run.effective_noise_multiplier

    def ours() -> float:
        return guarantee(TREE, ONCE, noise_multiplier=NOISE).epsilon(DELTA)

    def rdp() -> float:
        return float(RdpAccountant().compose(GaussianDpEvent(sigma)).get_epsilon(DELTA))

    def pld() -> float:
        return float(PLDAccountant().compose(GaussianDpEvent(sigma)).get_epsilon(DELTA))

    def report() -> float:
        return PrivacyReport.of(TREE, ONCE, noise_multiplier=NOISE, delta=DELTA).epsilon

    warm: dict[str, tuple[Callable[[], float], int]] = {
        "exact epsilon of a tree, warm": (ours, 200),
        "whole report of a tree, warm": (report, 100),
        "dp-accounting RDP, one Gaussian, warm": (rdp, 50),
        "dp-accounting PLD, one Gaussian, warm": (pld, 10),
        "Opacus RDP, one Gaussian, warm": (lambda: opacus_epsilon(sigma), 20),
    }
    rows: dict[str, dict[str, float | None]] = {
        name: {"seconds": least(job, repeats), "epsilon": job()}
        for name, (job, repeats) in warm.items()
    }
    often = Participation(2048, 5, 410)
    jobs = {"tree sensitivity, n=2048 k=5 b=410": lambda: BinaryTree(2048).sensitivity(often)}
    rows |= {name: {"seconds": least(job, 20), "epsilon": None} for name, job in jobs.items()}
    for name, code in (
        ("exact epsilon of a tree, cold start", COLD_EXACT),
        ("privpart epsilon, whole command", COLD_COMMAND),
        ("dp-accounting RDP, cold start", COLD_RDP),
        ("Opacus RDP, cold start", COLD_OPACUS),
        ("python -c pass", "pass"),
    ):
        rows[name] = {"seconds": cold(code), "epsilon": None}
    return rows


def main() -> None:
    """Measure, print and write."""
    warnings.simplefilter("ignore")  # Opacus warns that its optimal order is the last one
    facts = machine("dp-accounting", "numpy", "opacus", "scipy", "torch")
    rows = measure()
    print(
        f"{facts['processor']}, {facts['cores']} cores, 1 thread, load {facts['load_average']:.2f}"
    )
    base = rows["exact epsilon of a tree, warm"]["seconds"] or 0.0
    for name, row in rows.items():
        seconds, epsilon = row["seconds"] or 0.0, row["epsilon"]
        shown = "" if epsilon is None else f"epsilon {up(epsilon, 6)}"
        print(f"{name:40} {1e3 * seconds:10.3f} ms {seconds / base:10.1f} x   {shown}")
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({"machine": facts, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
