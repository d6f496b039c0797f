"""Accounting speed: an exact epsilon compared with dp-accounting and Opacus on the closest task.

Run: ``python benchmarks/accounting_speed.py``; writes benchmarks/results/accounting.json: the
minimum of several repeats of each job, in wall-clock seconds, all in one run.

The closest task of the other libraries is one Gaussian with the same mu: none supports a tree with
several participations (dp-accounting has a tree event with one). For Opacus it is the noise
multiplier of one step at sampling rate 1, which is the same Gaussian.
"""

import frame

import subprocess
import sys
import warnings
from collections.abc import Callable

from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from opacus.accountants import RDPAccountant

from accounting import BinaryTree, Participation, PrivacyReport, guarantee

DELTA, NOISE = 1e-6, 4.03
TREE, ONCE, OFTEN = BinaryTree(1600), Participation(1600), Participation(2048, 5, 410)
COLD = {
    "exact epsilon of a tree, cold start": (
        "from accounting import BinaryTree, Participation, guarantee; "
        "guarantee(BinaryTree(1600), Participation(1600), noise_multiplier=4.03).epsilon(1e-6)"
    ),
    "privpart epsilon, whole command": (
        "import sys; from privpart.cli.main import main; sys.argv[1:] = 'epsilon --rounds 1600 "
        "--noise-multiplier 4.03 --delta 1e-6'.split(); main()"
    ),
    "dp-accounting RDP, cold start": (
        "from dp_accounting import GaussianDpEvent; from dp_accounting.rdp import RdpAccountant; "
        "RdpAccountant().compose(GaussianDpEvent(1.215)).get_epsilon(1e-6)"
    ),
    "Opacus RDP, cold start": (
        "import warnings; warnings.simplefilter('ignore'); "
        "from opacus.accountants import RDPAccountant; a = RDPAccountant(); "
        "a.step(noise_multiplier=1.215, sample_rate=1.0); a.get_epsilon(delta=1e-6)"
    ),
    "python -c pass": "pass",
}


def opacus_epsilon(noise_multiplier: float) -> float:
    accountant = RDPAccountant()
    accountant.step(noise_multiplier=noise_multiplier, sample_rate=1.0)
    return float(accountant.get_epsilon(delta=DELTA))


def jobs() -> dict[str, tuple[Callable[[], float | None], int]]:
    """Map each job to a function, which returns an epsilon or None, and how often it is run."""
    event = GaussianDpEvent(
        guarantee(TREE, ONCE, noise_multiplier=NOISE).effective_noise_multiplier
    )

    def report() -> float:
        return PrivacyReport.of(TREE, ONCE, noise_multiplier=NOISE, delta=DELTA).epsilon

    def sensitivity() -> None:
        BinaryTree(2048).sensitivity(OFTEN)

    def fresh(code: str) -> None:
        command = [sys.executable, "-c", code]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    return {
        "exact epsilon of a tree, warm": (
            lambda: guarantee(TREE, ONCE, noise_multiplier=NOISE).epsilon(DELTA),
            200,
        ),
        "whole report of a tree, warm": (report, 100),
        "dp-accounting RDP, one Gaussian, warm": (
            lambda: float(RdpAccountant().compose(event).get_epsilon(DELTA)),
            50,
        ),
        "dp-accounting PLD, one Gaussian, warm": (
            lambda: float(PLDAccountant().compose(event).get_epsilon(DELTA)),
            10,
        ),
        "Opacus RDP, one Gaussian, warm": (lambda: opacus_epsilon(event.noise_multiplier), 20),
        "tree sensitivity, n=2048 k=5 b=410": (sensitivity, 20),
        **{name: (lambda code=code: fresh(code), 5) for name, code in COLD.items()},
    }


def main() -> None:
    given = frame.options(__doc__, "accounting.json")
    warnings.simplefilter("ignore")  # Opacus warns that its optimal order is the last one
    result = frame.Result(given.result, "dp-accounting", "numpy", "opacus", "scipy", "torch")
    rows: dict[str, dict[str, float | None]] = {}
    for name, (job, repeats) in jobs().items():
        epsilons: list[float | None] = []
        repeat = {name: lambda job=job, into=epsilons: into.append(job())}
        times = frame.in_turns(repeat, 1 if given.quick else repeats)[name]
        rows[name] = {"seconds": min(times).wall, "epsilon": epsilons[-1]}
        frame.show(name, rows[name])
    result.write(rows=rows)


if __name__ == "__main__":
    main()
