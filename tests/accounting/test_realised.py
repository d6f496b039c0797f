"""Realised: what a log cost, by brute force; and logs that cannot be read."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import (
    BinaryTree,
    BufferedToeplitz,
    ConfigError,
    FixedOrder,
    Grouped,
    Guarantee,
    Independent,
    Participation,
    PrivacyReport,
    Realised,
    Toeplitz,
)
from accounting.realised import read_log, realised_sensitivity

HISTORIES = st.dictionaries(
    st.text(min_size=1, max_size=3), st.sets(st.integers(0, 11), min_size=1, max_size=5), min_size=1
)
MECHANISMS = [
    Independent(12),
    BinaryTree(12),
    BinaryTree(12, estimator="online"),
    Toeplitz(12, (1.0, 0.5, 0.25)),
    Toeplitz(12, (1.0, -0.5, 0.25)),
    BufferedToeplitz(12, (0.9, 0.5), (0.2, 0.3)),
]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda m: repr(m)[:40])
@given(histories=HISTORIES)
def test_a_log_costs_what_its_worst_client_costs(mechanism, histories):
    encoder = mechanism.encoder()
    gram = np.abs(encoder.T @ encoder)
    truth = max(gram[np.ix_(sorted(own), sorted(own))].sum() for own in histories.values())
    found = realised_sensitivity(mechanism, histories, Participation.from_log(12, histories))
    assert found.squared >= truth * (1 - 1e-13)
    if found.exact:
        assert found.squared == pytest.approx(truth, rel=1e-9)


def test_promise_and_fact():
    tree = BinaryTree(64)
    log = {"ada": [0, 20, 40], "bob": [63]}
    promised = Participation(64, 4, 16)
    seen = Realised.of(tree, log, promised, noise_multiplier=10.0, delta=1e-6)
    assert (seen.clients, seen.max_participations, seen.min_separation) == (2, 3, 20)
    assert seen.deviations == ()
    report = PrivacyReport.of(tree, promised, noise_multiplier=10.0, delta=1e-6, realised=seen)
    assert seen.epsilon < report.epsilon
    assert seen.epsilon == Guarantee(seen.mu).epsilon(1e-6)
    assert "By the log of 2 clients" in report.statement()


@pytest.mark.parametrize(
    ("promised", "fault"),
    [
        (Participation(64, 2, 16), "took part 3 times, 2 promised"),
        (Participation(64, 3, 30), "came again after 20 rounds, 30 promised"),
        (FixedOrder(64, 3, 20), None),
        (FixedOrder(64, 4, 16), "did not keep to the fixed order"),
    ],
)
def test_a_broken_promise_is_said(promised, fault):
    log = {"ada": [0, 20, 40]}
    seen = Realised.of(BinaryTree(64), log, promised, noise_multiplier=9.0, delta=1e-6)
    assert seen.deviations == (() if fault is None else seen.deviations)
    assert (fault is None) == (not seen.deviations)
    assert fault is None or fault in seen.deviations[0]


def test_long_runs_and_groups_cost_at_most_the_limits_of_the_log():
    log = {"ada": [0, 2999], "bob": [5]}
    worst = Participation.from_log(3000, log)
    found = realised_sensitivity(BinaryTree(3000), log, worst)
    assert found.squared == BinaryTree(3000).sensitivity(worst).squared
    assert not found.exact
    grouped = Grouped([[0], [0, 1]], [BinaryTree(2), BinaryTree(1)], [3, 4])
    both = {"ada": [0, 1]}
    worst = Participation.from_log(2, both)
    found = realised_sensitivity(grouped, both, worst)
    assert found.squared == grouped.sensitivity(worst).squared


def test_a_csv_file(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("round,weight,client\n3,1.5,ada\n0,1,bob\n12,,ada\n")
    assert read_log(log) == {"ada": [3, 12], "bob": [0]}
    log.write_bytes(b"\xef\xbb\xbfclient,round\r\nada,3\r\nada,4\r\n")  # as Excel saves it
    assert read_log(log) == {"ada": [3, 4]}
    log.write_text("client,round\n\u00e9ve \u4e2d,3\n\n7,4\n", encoding="utf-8")
    assert read_log(log) == {"\u00e9ve \u4e2d": [3], "7": [4]}


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "lacks client and round"),
        (b"user,round\nada,1\n", "lacks client"),
        (b"client,round\n", "lists no participation"),
        (b"client,round\nada,1.5\n", "line 2: must hold a client and a round"),
        (b"client,round\nada,-1\n", "line 2"),
        (b"client,round\n,3\n", "line 2"),
        (b"client,round\n ada,1\n", "line 2: client ' ada' has whitespace around it; remove it"),
        ("client,round\nada\u00a0,1\n".encode(), r"line 2: client 'ada\\xa0' has whitespace"),
        (b"client,round\nada,1\nada,2,3\n", "line 3: has 3 fields, the first line 2"),
        (b"client,round,client\nada,1,bob\n", "has two columns 'client'"),
        (b"client,round,Round \nada,1,2\n", "has two columns 'round'"),
        (b'client,round\n"ada"x,1\n', "is not a CSV file"),
        (b'client,round\n"a\nb",1\n', r"line 3: client 'a\\nb' has characters that cannot be seen"),
        *(
            (f"client,round\nada,0\na{unseen}da,1\n".encode(), "line 3: client .* cannot be seen")
            for unseen in "\u200b\u200d\u2060\ufeff\u00ad\u034f\u115f\ufe0f\u202e\u3000\U000e0101"
        ),
        *(
            (f"client,round\n{name},1\n".encode(), r"line 2: .* not in normal form \(NFKC\); write")
            for name in ("e\u0301ve", "\ufb01n", "\uff41da", "a\u00b2", "\u212b")
        ),
        (b"client,round\nada," + b"9" * 5000 + b"\n", "line 2: a round must be below"),
        ("client,round\nada,\u0663\n".encode(), "line 2"),
        (b"\xff\xfe\x00client", "is not a CSV file"),
        (b"client,round\n" + b"x" * 200_000 + b",1\n", "is not a CSV file"),
    ],
)
def test_logs_that_cannot_be_read(tmp_path, content, fault):
    log = tmp_path / "log.csv"
    log.write_bytes(content)
    with pytest.raises(ConfigError, match=fault):
        read_log(log)


def test_a_log_of_a_billion_rows_is_refused_unread(tmp_path):
    log = tmp_path / "log.csv"
    log.touch()
    os.truncate(log, 10_000_000_000)  # sparse
    with pytest.raises(ConfigError, match="10,000,000,000 bytes; at most"):
        read_log(log)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_log(tmp_path / "none.csv")
