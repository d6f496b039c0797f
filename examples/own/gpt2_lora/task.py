"""GPT-2 with LoRA adapters by peft, on the lines of a play; each speaker is a client.

The network is tiny, of characters, and starts from random weights, so that this runs without a
download. For a pretrained one, let ``base`` return ``GPT2LMHeadModel.from_pretrained("a-folder")``,
and take the tokens from its tokenizer.
"""

from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from privpart.data import from_dataset

HERE = Path(__file__).parent
END = 0  # token of the end of a line; 1 to 95 are the characters of ASCII that can be printed


def base():
    """Return the network that the adapter is for; a factory returns the same one every time."""
    config = GPT2Config(
        vocab_size=96,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=END,
        eos_token_id=END,
    )
    with torch.random.fork_rng():
        set_seed(0)
        return GPT2LMHeadModel(config)


def network(rank):
    """Return the base with adapters at the projections of attention."""
    lora = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=rank,
        lora_alpha=4 * rank,
        target_modules=["c_attn", "c_proj"],
        fan_in_fan_out=True,  # GPT-2 keeps its weights transposed
    )
    return get_peft_model(base(), lora)


def lines(name):
    """Return a play as a dataset with the columns speaker and text."""
    text = (HERE / name).read_text().splitlines()
    speakers, said = zip(*(line.split(": ", 1) for line in text), strict=True)
    return Dataset.from_dict({"speaker": speakers, "text": said})


def tokens(rows):
    """Return lines as token ids, all of one length; the network compares each with the next."""
    width = max(map(len, rows["text"])) + 1
    ids = torch.tensor([[ord(c) - 31 for c in t.ljust(width, "\x1f")] for t in rows["text"]])
    mask = torch.tensor([[k <= len(t) for k in range(width)] for t in rows["text"]])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~mask, -100)}


def clients(play):
    """Return the speakers, whose lines are made into tokens when they take part."""
    return from_dataset(lines(play), user="speaker", examples=tokens)


clients.words = ["", *map(chr, range(32, 127))]  # shown by privpart audit leakage


def loss_of_public_lines(module):
    """Return the mean loss of a character, in nats, on lines that no client holds."""
    return module(**tokens(lines("public.txt")[:])).loss.item()
