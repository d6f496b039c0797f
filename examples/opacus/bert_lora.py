"""A Hugging Face BERT with LoRA adapters by peft, trained with DP-FTRL in an ordinary loop.

The network is tiny and starts from random weights, so that this runs without a download. For a
pretrained one, take ``from_pretrained("a-folder", num_labels=2)`` and its tokenizer. The unit of
privacy is one review. What was trained can be resumed after a crash: run the same line again.

    python bert_lora.py --out run [--seed 0]    # a seed is for simulations, which are not private
"""

import argparse
from pathlib import Path

import pandas as pd
import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer, set_seed

from accounting.report import up
from privpart import FTRLEngine

TEXTS = Path(__file__).parent.parent / "own" / "bert_lora"


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
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int)
    given = parser.parse_args(arguments)
    model = network()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)

    engine = FTRLEngine(seed=given.seed)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(reviews("reviews.csv"), batch_size=32),
        epochs=3,
        max_grad_norm=1.0,
        target_epsilon=8.0,
        delta=1e-4,
        out=given.out,
        resume=True,
        scheduler=scheduler,
    )
    print(f"epsilon {up(engine.epsilon(1e-4))} for one review")
    for _ in range(engine.epochs_left):
        for tokens, mask, labels in loader:
            optimizer.zero_grad()
            logits = model(input_ids=tokens, attention_mask=mask).logits
            torch.nn.functional.cross_entropy(logits, labels).backward()
            optimizer.step()
    engine.close()

    model.eval()
    with torch.no_grad():
        tokens, mask, labels = next(iter(DataLoader(reviews("public.csv"), batch_size=1000)))
        right = model(input_ids=tokens, attention_mask=mask).logits.argmax(1) == labels
    print(f"accuracy on {len(labels)} public reviews: {right.float().mean():.1%}")


if __name__ == "__main__":
    main()
