"""Score: how close sentences are to the truth, and what a guess scores that needs no attack."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from scipy.optimize import linear_sum_assignment

from accounting.checks import ConfigError

Ids = Sequence[int]


def token_f1(tokens: Ids, truth: Ids) -> float:
    """Return the harmonic mean of precision and recall of the tokens, in any order.

    >>> token_f1([5, 5, 7], [7, 5])
    0.8
    """
    shared = (Counter(tokens) & Counter(truth)).total()
    return 2 * shared / (len(tokens) + len(truth)) if shared else 0.0


def rouge_l(tokens: Ids, truth: Ids) -> float:
    """Return the F1 of the longest common subsequence (Lin 2004).

    >>> rouge_l([1, 2, 9, 3], [1, 2, 3, 4])
    0.75
    """
    row = [0] * (len(truth) + 1)
    for token in tokens:
        before = 0
        for j, other in enumerate(truth):
            above = row[j + 1]
            row[j + 1] = before + 1 if token == other else max(row[j], above)
            before = above
    return 2 * row[-1] / (len(tokens) + len(truth)) if row[-1] else 0.0


@dataclass(frozen=True, slots=True)
class TextScore:
    """How close a sentence is to the true one."""

    found: tuple[int, ...]  # the sentence that was read, () if none was left for this one
    exact: bool  # token for token
    f1: float  # of the tokens, in any order
    rouge: float  # ROUGE-L, of the tokens in order


def text_scores(sentences: Sequence[Ids], truth: Sequence[Ids]) -> list[TextScore]:
    """Return a score per true sentence, each paired with another found one, for the most ROUGE-L.

    Who attacks does not know which sentence is whose; neither does the order of a batch matter.
    """
    if len(sentences) > len(truth):
        raise ConfigError(f"found: {len(sentences)} sentences for {len(truth)} true ones.")
    gain = [
        [rouge_l(sentence, true) + token_f1(sentence, true) for sentence in sentences]
        for true in truth
    ]
    paired: dict[int, tuple[int, ...]] = {}
    if sentences:
        rows, columns = linear_sum_assignment(gain, maximize=True)
        paired = {int(i): tuple(sentences[int(j)]) for i, j in zip(rows, columns, strict=True)}
    scores = []
    for i, true in enumerate(truth):
        best = paired.get(i, ())
        exact = best == tuple(true)
        scores.append(TextScore(best, exact, token_f1(best, true), rouge_l(best, true)))
    return scores


def unigram_guess(public: Sequence[Ids], length: int) -> tuple[int, ...]:
    """Return the tokens that a sentence of this length most likely has, by public sentences.

    Each further copy of a token counts as often as public sentences have so many copies.
    """
    copies: Counter[tuple[int, int]] = Counter()
    for sentence in public:
        for token, count in Counter(sentence).items():
            copies.update((token, k) for k in range(count))
    likely = sorted(copies, key=lambda pair: (-copies[pair], pair))
    return tuple(token for token, _ in likely[:length])


def bigram_guess(public: Sequence[Ids], length: int) -> tuple[int, ...]:
    """Return the sentence that a bigram model of public sentences finds most likely."""
    starts = Counter(sentence[0] for sentence in public if len(sentence))
    follow: dict[int, Counter[int]] = {}
    for a, b in chain.from_iterable(map(pairwise, public)):
        follow.setdefault(a, Counter())[b] += 1
    paths: dict[int, tuple[float, tuple[int, ...]]]
    paths = {token: (float(count), (token,)) for token, count in starts.items()}
    for _ in range(length - 1):
        longer = [
            (chance * count / follow[token].total(), (*path, other))
            for token, (chance, path) in paths.items()
            for other, count in follow.get(token, Counter()).items()
        ]
        if not longer:
            break
        paths = {path[-1]: (chance, path) for chance, path in sorted(longer)}
    return max(paths.values())[1] if paths else ()
