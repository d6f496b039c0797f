"""Private retrieval: bytes and time as functions of the number of slices and their size.

Run: ``python benchmarks/pir.py``; writes benchmarks/results/pir.json.

Federated Select leaves open what hiding the keys from the stores costs (Charles et al. 2022,
section 6). This script measures, per key and on one thread, a client's queries, one store's answer
and a client's decoding; minimum, median and maximum of several repeats. Bytes are those of the
arrays that are sent, compared with a broadcast of everything. The stores must not collude; each of
the two computes an answer.
"""

import frame

from typing import Any

import numpy as np

from privpart.select import private_retrieval

SLICES = (64, 200, 2048, 10_000, 100_000)
RECORD_BYTES = {
    "one byte per number, 96 numbers and scale": 104,
    "word of a language model, 96 numbers": 384,
    "row of 500 tags": 2000,
    "filter of the CNN with its 49 x 512 columns": 103_556,
}
LARGEST = 250_000_000  # bytes of a store, so that the benchmark fits into small machines
KEYS = 16


def measure(count: int, size: int, rng: np.random.Generator, repeats: int) -> dict[str, Any]:
    """Measure one store of ``count`` records of ``size`` bytes."""
    records = rng.integers(256, size=(count, size), dtype=np.uint8)
    keys = rng.integers(count, size=KEYS).tolist()
    one, two = private_retrieval.queries(keys, count)
    first, second = (
        private_retrieval.products(records, one),
        private_retrieval.products(records, two),
    )
    if not np.array_equal(private_retrieval.decode(first, second), records[keys]):
        raise AssertionError("wrong records")
    private = one.nbytes + two.nbytes + first.nbytes + second.nbytes
    jobs = {
        "query": lambda: private_retrieval.queries(keys, count),
        "answer of one store": lambda: private_retrieval.products(records, one),
        "decode": lambda: private_retrieval.decode(first, second),
    }
    return {
        "slices": count,
        "record_bytes": size,
        "bytes_up_per_key": (one.nbytes + two.nbytes) // KEYS,
        "bytes_down_per_key": (first.nbytes + second.nbytes) // KEYS,
        "bytes_of_everything": records.nbytes,
        "fewer_bytes_up_to_keys": (records.nbytes - 1) // (private // KEYS),
        "microseconds_per_key": {
            name: frame.spread(1e6 * one.wall / KEYS for one in times)
            for name, times in frame.in_turns(jobs, repeats).items()
        },
    }


def main() -> None:
    quick = {"slices": [64], "repeats": 1}
    given = frame.options(__doc__, "pir.json", quick=quick, slices=SLICES, repeats=7)
    result, rng = frame.Result(given.result, "numpy"), np.random.default_rng(0)
    rows = []
    for name, size in RECORD_BYTES.items():
        for count in (slices for slices in given.slices if slices * size <= LARGEST):
            rows.append({"record": name} | measure(count, size, rng, given.repeats))
            frame.show(f"{count:,} of {name}", rows[-1])
    result.write(repeats=given.repeats, keys_at_once=KEYS, rows=rows)


if __name__ == "__main__":
    main()
