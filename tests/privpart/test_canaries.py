"""Canaries in a run: clients like others, whose coins and releases survive a crash."""

import math

import numpy as np
import pytest
import torch
from plans import small_plan

import privpart
from accounting import BinaryTree, ConfigError, Grouped, Independent, Participation
from attacks.lower_bounds.planted import PlantedCanaries, canary_clients, sums_of_releases
from privpart import RunFolder, SeededSource, Server, ServerOptimizer, fit
from privpart.data.arrays import from_tensors
from privpart.engines import ghost_sum, methods
from privpart.engines.canaries import cohorts_with_canaries
from privpart.engines.embedded import EmbeddedEngine
from privpart.run import canaries as canaries_of_run
from privpart.run.canaries import read_canary_key, read_releases
from privpart.run.store import StorageError
from privpart.training.plan_file import validated
from privpart.training.training import Own, training

COUNT = 24
PLAN = {
    "schema": "privpart/plan/1",
    "privacy": {
        "rounds": 4, "clip_norm": 1.0, "noise_multiplier": 1.0, "delta": 1e-5,
        "mechanism": {"name": "tree"},
    },
    "model": {},
    "data": {"clients_per_round": 2},
    "client": {"learning_rate": 0.1},
    "server": {"learning_rate": 0.5, "momentum": 0.5},
    "canaries": {"count": COUNT},
}  # fmt: skip


def clients(user=tuple(i // 2 for i in range(16))):
    x = torch.arange(64.0).reshape(16, 4) / 64
    return from_tensors((x, torch.arange(16) % 3), user=list(user))


def network() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        return torch.nn.Linear(4, 3 * 2)


def train(out, *, population=None, **options):
    fields = {"plan": PLAN, "canaries": canary_clients, "progress": False} | options
    return privpart.train(network(), population or clients(), out=out, **fields)


def files(folder):
    names = ("canary-key", "canary-releases", "state-000004.safetensors")
    return [(folder / name).read_bytes() for name in names]


def full(*_):
    raise OSError(28, "No space left on device")


class StoppedError(Exception):
    pass


def test_a_run_that_crashes_at_any_commit_ends_with_the_same_releases(tmp_path, monkeypatch):
    train(tmp_path / "whole", seed=3)
    expected = files(tmp_path / "whole")
    commit = RunFolder.commit
    for before in (False, True):  # the row of a round is on the disk before its commit
        out = tmp_path / f"stopped-{before}"

        def stopping(run, server, counts, before=before):
            if run.rounds == 2 and before:
                raise StoppedError
            commit(run, server, counts)
            if run.rounds == 3:
                raise StoppedError

        with monkeypatch.context() as patch:
            patch.setattr(RunFolder, "commit", stopping)
            with pytest.raises(StoppedError):
                train(out, seed=3)
        train(out, resume=True)
        assert files(out) == expected


def test_rows_that_are_lost_and_keys_of_others_are_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(canaries_of_run, "append_durably", full)
        with pytest.raises(StorageError, match="could not be saved"):
            train(tmp_path / "full")
    out = tmp_path / "run"
    train(out, seed=1)
    with privpart.RunFolder.open(out) as run:
        facts = run.facts
    assert read_releases(out, COUNT, 4).shape == (5, COUNT)
    rows = (out / "canary-releases").read_bytes()
    (out / "canary-releases").write_bytes(rows[:-8])
    with pytest.raises(ConfigError, match="damaged or of another run"):
        read_releases(out, COUNT, 4)
    for value in (np.nan, np.inf, 1e200):  # whose square overflows
        (out / "canary-releases").write_bytes(rows[:-8] + np.array(value, "<f8").tobytes())
        with pytest.raises(ConfigError, match="no model has"):
            read_releases(out, COUNT, 4)
    (out / "canary-releases").write_bytes(rows[: 8 * COUNT])
    with pytest.raises(ConfigError, match="1 of 4 committed rounds"):
        train(out, resume=True)
    (out / "canary-key").write_bytes(bytes(32))
    with pytest.raises(ConfigError, match="not the key of this run"):
        train(out, resume=True)
    (out / "canary-key").unlink()
    with pytest.raises(ConfigError, match="is lost"):
        read_canary_key(out, facts)
    with pytest.raises(ConfigError, match="has no canaries"):
        read_canary_key(out, {})


def test_a_table_needs_someone_who_makes_canaries_and_the_other_way_round(tmp_path):
    with pytest.raises(ConfigError, match="nothing here makes them"):
        train(tmp_path / "run", canaries=None)
    assert not (tmp_path / "run").exists()
    setup = training(validated(PLAN, in_python=True), objects=Own(network(), clients()))
    with pytest.raises(ConfigError, match="nothing here makes them"):  # a sweep, for instance
        setup.run(setup.promise(), SeededSource(0))
    without = {key: value for key, value in PLAN.items() if key != "canaries"}
    with pytest.raises(ConfigError, match=r"no table \[canaries\]"):
        train(tmp_path / "run", plan=without)
    assert "canaries" not in validated(without, in_python=True).to_json()
    hashes = {validated({**PLAN, "canaries": {"count": n}}, in_python=True).hash for n in (20, 21)}
    assert len(hashes) == 2


ADAPTIVE = {
    "mechanism": {"name": "independent"},
    "adaptive_clipping": {"bit_noise_multiplier": 5.0},
}


@pytest.mark.parametrize(
    ("table", "change", "said"),
    [
        ("canaries", {"count": 19}, "canaries.count: Input should be greater"),
        ("server", {"kind": "adam"}, "models that adam made"),
        ("privacy", PLAN["privacy"] | {"noise_multiplier": 0.0}, "no epsilon to audit"),
        ("privacy", PLAN["privacy"] | ADAPTIVE, "adaptive_clipping"),
    ],
)
def test_plans_whose_models_cannot_be_read_for_canaries_are_refused(table, change, said):
    with pytest.raises(ConfigError, match=said):
        validated(PLAN | {table: change}, in_python=True)


def planted(promised, dim=60) -> PlantedCanaries:
    mechanism, participation = promised.mechanism, promised.participation
    fields = {"dim": dim, "count": 20, "seed": 1, "momentum": 0.5, "key": bytes(range(32))}
    return PlantedCanaries(mechanism, participation, **fields)


class Sums:
    """An engine that hands over sums, as the operator's own simulation may."""

    def run(self, task, start):
        raise AssertionError("sums are faster")

    def sums(self, task, start):
        total = torch.full_like(start, 0.01, dtype=torch.float64)
        yield task.sum_of(task.clients, total, [0.01] * len(task.clients))


class Zeros:
    def __init__(self, sizes=(60,)):
        self.sizes = sizes

    def run(self, task, start):
        dim = sum(self.sizes[g] for g in task.active or range(len(self.sizes)))
        for client in task.clients:
            yield task.update(client, torch.zeros(dim))


def released(engine, canaries, promised, dim, cohorts):
    server = Server(
        promised, torch.zeros(dim), source=SeededSource(1), optimizer=ServerOptimizer(momentum=0.5)
    )
    models = [server.parameters.clone()]
    records = fit(
        server,
        engine,
        cohorts_with_canaries(cohorts, canaries),
        canaries=canaries,
        commit=lambda server, _: models.append(server.parameters.clone()),
    )
    return np.stack([model.numpy() for model in models]), records


@pytest.mark.parametrize("engine", [Sums(), Zeros()], ids=["beside sums", "updates"])
def test_the_server_clips_each_canary_and_only_those_whose_coin_says_so(engine):
    promised = small_plan(noise_multiplier=2.0**-20, report_goal=2)
    canaries = planted(promised)
    models, records = released(engine, canaries, promised, 60, [[0, 1], [2, 3], [4, 5], [6, 7]])
    sums = 2 * sums_of_releases(models, range(4), learning_rate=1.0, momentum=0.5)
    if isinstance(engine, Sums):
        sums = sums - 0.01
    expected = np.where(canaries.present, 0.5, 0.0)
    own = canaries.project(torch.from_numpy(sums[0])).numpy()
    assert own == pytest.approx(expected, abs=1e-3)  # four clip norms were sent
    assert np.abs(sums[1:]).max() < 1e-3
    assert 0 < canaries.present.sum() < 20
    assert records[0].counts.summed == 2 * isinstance(engine, Sums)


WAYS = {
    "ghost": ({"steps": 1, "batch_size": 2}, {}),
    "vectorized": ({"steps": 3, "batch_size": 2}, {"batching": "vmap"}),
}


def summing(way):
    """An engine of the package that hands over sums; what its clients add is lost in rounding."""
    local, options = WAYS[way]
    rows = [[2 * user, 2 * user + 1] for user in range(8)]
    users = privpart.Users(torch.zeros(16, 4), torch.arange(16) % 3, rows)
    model = privpart.PartialModel(lambda: torch.nn.Linear(4, 12), seed=1)
    training_of_clients = privpart.LocalTraining(learning_rate=1e-9, **local)
    return EmbeddedEngine(
        model, users, local=training_of_clients, data_seed=0, sums=True, **options
    )


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_sums_its_clients_clips_and_sums_canaries_too(way, monkeypatch):
    def own(promised, canaries):
        cohorts = [[0, 1], [2, 3], [4, 5], [6, 7]]
        models, records = released(summing(way), canaries, promised, 60, cohorts)
        # models of float32 begin at zero, and the engine's clients change nothing that shows
        sums = 2 * sums_of_releases(models, range(4), learning_rate=1.0, momentum=0.5)
        return canaries.project(torch.from_numpy(sums[0])).numpy(), records[0].counts

    promised = small_plan(noise_multiplier=2.0**-20, report_goal=2)
    canaries = planted(promised)
    added, counts = own(promised, canaries)
    assert added == pytest.approx(np.where(canaries.present, 0.5, 0.0), abs=1e-3)
    assert counts.clipped_by == {"EmbeddedEngine": 2 + canaries.present.sum()}
    # they passed the engine's clip, and not the server's: here it is twice as long
    module, clipping = (ghost_sum, "factors") if way == "ghost" else (methods, "clip_and_measure")
    right = getattr(module, clipping)
    monkeypatch.setattr(module, clipping, lambda of, norm, **out: right(of, 2 * norm, **out))
    added, _ = own(promised, canaries)
    assert added == pytest.approx(np.where(canaries.present, 1.0, 0.0), abs=1e-2)


def test_a_client_with_the_id_of_a_canary_is_refused():
    canaries = planted(small_plan())
    absent = next(j for j, there in enumerate(canaries.present) if not there)
    for taken in (canaries.clients(0)[0], f"canary-{absent}"):
        with pytest.raises(ConfigError, match="which is a canary's"):
            cohorts_with_canaries([[taken]] * 4, canaries)


def test_a_population_with_the_id_of_a_canary_is_refused_before_the_run_begins(tmp_path):
    with pytest.raises(ConfigError, match="which is a canary's"):
        train(tmp_path / "run", population=clients([f"canary-{i}" for i in range(16)]))
    assert not (tmp_path / "run").exists()


def test_a_key_that_cannot_be_written_is_one_sentence_and_the_folder_is_let_go(
    tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(canaries_of_run, "write_durably", full)
        with pytest.raises(StorageError, match=r"key of the canaries .* the run was closed"):
            train(tmp_path / "run")
    with pytest.raises(ConfigError, match="was ended early"):  # not: in use by another process
        train(tmp_path / "run", resume=True)


def test_scores_of_groups_that_take_turns_are_those_of_the_accountant():
    """Each canary lies in one group, in rounds in which that group trains."""
    schedule = ((0, 1), (0,), (1,), (0, 1))
    mechanism = Grouped(schedule, (BinaryTree(3), BinaryTree(3)), (30, 40))
    promised = small_plan(mechanism, noise_multiplier=1e-4, report_goal=2)
    canaries = planted(promised, 70)
    models, _ = released(Zeros((30, 40)), canaries, promised, 70, [[0], [1], [2], [3]])
    releases = np.stack([canaries.project(torch.from_numpy(m)).numpy() for m in models])
    scores, mu = canaries.seen(
        releases, noise_multiplier=1e-4, clip_norm=0.5, report_goal=2, learning_rate=1.0
    )
    assert mu.max() <= promised.guarantee().mu
    assert np.abs(scores - mu * canaries.present).max() < 10  # of 17,000 deviations


def test_coins_are_fair_and_those_of_the_key():
    def coins(key, dim=4000, count=4000):
        own = {"dim": dim, "count": count, "seed": 0, "key": key and key.to_bytes(32, "big")}
        return PlantedCanaries(Independent(2), Participation(2), **own).present

    assert (coins(1) == coins(1)).all()
    assert abs(coins(1).mean() - 0.5) < 5 / math.sqrt(4 * 4000)
    assert abs((coins(1) == coins(2)).mean() - 0.5) < 5 / math.sqrt(4 * 4000)
    with pytest.raises(ConfigError, match="32 bytes"):
        coins(None)
    with pytest.raises(ConfigError, match="a parameter of its own"):
        coins(1, dim=19, count=20)
