"""Noise for a budget: how much noise meets epsilon = 2 with each mechanism.

Run: python examples/noise_for_a_budget.py
"""

from accounting import (
    BinaryTree,
    Participation,
    PrivacyReport,
    calibrate,
    error,
    guarantee,
    optimize,
)

ROUNDS, DELTA, TARGET = 512, 1e-7, 2.0


def main() -> None:
    # Every client takes part at most 4 times, at least 128 rounds apart. Timers on the devices or
    # the server's ledger must enforce this.
    clients = Participation(ROUNDS, max_participations=4, min_separation=128)
    candidates = {
        "tree": BinaryTree(ROUNDS),
        "tree, online estimator": BinaryTree(ROUNDS, estimator="online"),
        "BLT, 2 buffers": optimize("blt", clients, buffers=2),
    }
    print(f"epsilon <= {TARGET:g} at delta {DELTA:g}, zero-out adjacency, {clients}\n")
    for name, mechanism in candidates.items():
        z = calibrate(mechanism, clients, target_epsilon=TARGET, delta=DELTA)
        run = guarantee(mechanism, clients, noise_multiplier=z)
        noise = error(mechanism, clients).rmse / run.mu
        print(f"{name:<24} noise multiplier {z:7.3f}   noise in the model {noise:6.2f} x clip norm")

    tree = candidates["tree"]
    z = calibrate(tree, clients, target_epsilon=TARGET, delta=DELTA)
    report = PrivacyReport.of(tree, clients, noise_multiplier=z, delta=DELTA, population=100_000)
    print("\n" + report.statement())


if __name__ == "__main__":
    main()
