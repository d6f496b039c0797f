"""A Hugging Face BERT with LoRA adapters by peft, with DP-FTRL or DP-SGD in an ordinary loop.

The network is tiny and starts from random weights, so that this runs without a download. For a
pretrained one, take ``from_pretrained("a-folder", num_labels=2)`` and its tokenizer. The unit of
privacy is one review. With ``from opacus import PrivacyEngine`` and ``PrivacyEngine()`` in two
lines, this is a program of Opacus's.

    python bert_lora.py [--dp-sgd] [--epochs 3] [--out FOLDER]

With ``--out`` every step is kept: after a crash, the same line continues. A seed is for
simulations, which are not private.
"""

import argparse
from pathlib import Path

import pandas as pd
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer, set_seed

from privpart import FTRLEngine

TEXTS = Path(__file__).parent.parent / "own" / "bert_lora"
BATCH, DELTA = 32, 1e-4


def network():
    config = BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
    )
    set_seed(0)
    base = BertForSequenceClassification(config)
    lora = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=4,
        lora_alpha=8,
        target_modules=["query", "value"],
        modules_to_save=["classifier"],
    )
    return get_peft_model(base, lora)


def reviews(name):
    rows = pd.read_csv(TEXTS / name)
    texts = rows["text"].tolist()
    tokenizer = BertTokenizer.from_pretrained(TEXTS)
    found = tokenizer(texts, padding="max_length", max_length=16, truncation=True)
    labels = torch.tensor(rows["label"].to_numpy())
    return TensorDataset(*map(torch.tensor, (found["input_ids"], found["attention_mask"])), labels)


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--dp-sgd", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int)
    given = parser.parse_args(arguments)

    model = network()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    data_loader = DataLoader(reviews("reviews.csv"), batch_size=BATCH)

    privacy_engine = FTRLEngine(seed=given.seed)
    model, optimizer, data_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=data_loader,
        target_epsilon=8.0,
        target_delta=DELTA,
        epochs=given.epochs,
        max_grad_norm=1.0,
        poisson_sampling=given.dp_sgd,
        **({"out": given.out, "resume": True} if given.out else {}),
    )
    print(f"epsilon {privacy_engine.get_epsilon(DELTA)} at delta {DELTA:g}, before training")

    begun, checkpoint = 0, given.out and given.out.with_suffix(".pt")
    if checkpoint and checkpoint.exists():
        begun = privacy_engine.load_checkpoint(path=checkpoint, module=model, optimizer=optimizer)[
            "epochs"
        ]
    criterion = nn.CrossEntropyLoss()
    for epoch in range(begun, given.epochs):
        for tokens, mask, labels in data_loader:
            optimizer.zero_grad()
            logits = model(input_ids=tokens, attention_mask=mask).logits
            criterion(logits, labels).backward()
            optimizer.step()
        if checkpoint:
            privacy_engine.save_checkpoint(
                path=checkpoint,
                module=model,
                optimizer=optimizer,
                checkpoint_dict={"epochs": epoch + 1},
            )

    model.eval()
    with torch.no_grad():
        tokens, mask, labels = reviews("public.csv").tensors
        logits = model(input_ids=tokens, attention_mask=mask).logits
        right = (logits.argmax(1) == labels).float().mean()
    epsilon = privacy_engine.get_epsilon(DELTA)
    print(f"accuracy {right:.1%}, epsilon {epsilon} after training")
    return float(right), epsilon


if __name__ == "__main__":
    main()
