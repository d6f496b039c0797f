"""Secure sums: a server that learns the sum of many parties' vectors, and no vector.

The protocol is SecAgg+ (Bell, Bonawitz, Gascon, Lepoint, Raykova, CCS 2020) with the signed
keys and the signed list of survivors of Bonawitz et al. (CCS 2017): ``party`` and ``coordinator``
are its two sides, bytes in and bytes out, and ``rules`` what a plan fixes of it. Docs:
docs/concepts/secure-sums.md, which also has the proofs.
"""
