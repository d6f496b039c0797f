"""Private retrieval: bytes and time as functions of the number of slices and their size.

Run: ``python benchmarks/pir.py``; writes benchmarks/results/pir.json.

Federated Select leaves open what hiding the keys from the stores costs (Charles et al. 2022,
section 6). This script measures, per key and on one thread, a client's queries, one store's answer
and a client's decoding; minimum, median and maximum of several repeats. Bytes are those of the
arrays that are sent, compared with a broadcast of everything. The stores must not collude; each of
the two computes an answer.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from privpart.select import private_retrieval

RESULT = Path(__file__).parent / "results" / "pir.json"
SLICES = (64, 200, 2048, 10_000, 100_000)
RECORD_BYTES = {
    "one byte per number, 96 numbers and scale": 104,
    "word of a language model, 96 numbers": 384,
    "row of 500 tags": 2000,
    "filter of the CNN with its 49 x 512 columns": 103_556,
}
LARGEST = 250_000_000  # bytes of a store, so that the benchmark fits into small machines
REPEATS, KEYS = 7, 16


def spread(job: Callable[[], object], per: int) -> dict[str, float]:
    """Return microseconds per key of one run of ``job`` on ``per`` keys."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        job()
        times.append(1e6 * (time.perf_counter() - start) / per)
    return {"least": min(times[1:]), "median": statistics.median(times[1:]), "most": max(times[1:])}


def measure(count: int, size: int, rng: np.random.Generator) -> dict[str, Any]:
    """Measure one store of ``count`` records of ``size`` bytes."""
    records = rng.integers(256, size=(count, size), dtype=np.uint8)
    keys = rng.integers(count, size=KEYS).tolist()
    one, two = private_retrieval.queries(keys, count)
    first, second = private_retrieval.answers(records, one), private_retrieval.answers(records, two)
    if not np.array_equal(private_retrieval.decode(first, second), records[keys]):
        raise AssertionError("wrong records")
    return {
        "slices": count,
        "record_bytes": size,
        "bytes_up_per_key": (one.nbytes + two.nbytes) // KEYS,
        "bytes_down_per_key": (first.nbytes + second.nbytes) // KEYS,
        "bytes_of_everything": records.nbytes,
        "fewer_bytes_up_to_keys": private_retrieval.most_keys(count, size),
        "microseconds_per_key": {
            "query": spread(lambda: private_retrieval.queries(keys, count), KEYS),
            "answer of one store": spread(lambda: private_retrieval.answers(records, one), KEYS),
            "decode": spread(lambda: private_retrieval.decode(first, second), KEYS),
        },
    }


def main() -> None:
    """Measure, print a table, and write the results."""
    rng = np.random.default_rng(0)
    rows = []
    print(
        f"{'slices':>8} {'bytes':>8} {'up/key':>8} {'down/key':>9} {'most m':>7} {'answer us':>10}"
    )
    for name, size in RECORD_BYTES.items():
        for count in SLICES:
            if count * size > LARGEST:
                continue
            row = measure(count, size, rng)
            rows.append({"record": name} | row)
            answer = row["microseconds_per_key"]["answer of one store"]["median"]
            print(
                f"{count:>8,} {size:>8,} {row['bytes_up_per_key']:>8,} "
                f"{row['bytes_down_per_key']:>9,} {row['fewer_bytes_up_to_keys']:>7,} "
                f"{answer:>10,.0f}"
            )
    result = {"machine": machine("numpy"), "repeats": REPEATS, "keys_at_once": KEYS, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
