"""A Hugging Face BERT with LoRA adapters by peft, on a table of texts with user ids.

The network is tiny and starts from random weights, so that this runs without a download. For a
pretrained one, let ``base`` return ``from_pretrained("a-folder", num_labels=2)``, and read the
tokenizer from the same folder.
"""

from pathlib import Path

import pandas as pd
import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer, set_seed

from privpart.data import from_frame

HERE = Path(__file__).parent
TOKENIZER = BertTokenizer.from_pretrained(HERE)


def base():
    """Return the network that the adapter is for; a factory returns the same one every time."""
    config = BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    with torch.random.fork_rng():
        set_seed(0)
        return BertForSequenceClassification(config)


def network(rank):
    """Return the base with adapters at queries and values, and a head that is saved with them."""
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["query", "value"],
        modules_to_save=["classifier"],
    )
    return get_peft_model(base(), lora)


def tokens(rows):
    """Return the inputs of the network, and labels, from a table with text and label."""
    found = TOKENIZER(rows["text"].tolist(), padding=True, truncation=True, return_tensors="pt")
    return {**found, "labels": torch.tensor(rows["label"].to_numpy())}


def clients():
    """Return the users of reviews.csv, whose texts are tokenized when they take part."""
    return from_frame(pd.read_csv(HERE / "reviews.csv"), user="user", examples=tokens)


clients.words = TOKENIZER.convert_ids_to_tokens(range(60))  # shown by privpart audit leakage


def accuracy(module):
    """Return the share of public reviews that the network gets right."""
    inputs = tokens(pd.read_csv(HERE / "public.csv"))
    labels = inputs.pop("labels")
    return float((module(**inputs).logits.argmax(dim=1) == labels).float().mean())
