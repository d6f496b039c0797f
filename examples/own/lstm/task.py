"""Text by author, of which each next character is predicted.

The texts are the help topics of Python itself, in pieces of 1,000 characters; each piece stands for
an author. A batch is a dict: the network gets its entries by name, all but the labels.
"""

from pydoc_data.topics import topics

import torch

from privpart.data import from_tensors

LENGTH = 50
"""Characters of an example, after each of which the next one is predicted."""


def texts(*, public):
    """Return the pieces by author; those of every tenth topic are public."""
    chosen = [name for n, name in enumerate(sorted(topics)) if (n % 10 == 0) == public]
    return {
        f"{name}, part {start // 1000 + 1}": topics[name][start : start + 1000]
        for name in chosen
        for start in range(0, len(topics[name]) - 999, 1000)
    }


def examples(text):
    """Return the network's inputs and labels, each of shape (n, LENGTH)."""
    ids = torch.tensor(list(text.encode("ascii", "replace")))
    windows = ids.unfold(0, LENGTH + 1, LENGTH)
    return {"characters": windows[:, :-1], "labels": windows[:, 1:]}


def clients():
    """Return the authors; their ids are strings."""
    found = {author: examples(text) for author, text in texts(public=False).items()}
    batch = {
        key: torch.cat([own[key] for own in found.values()]) for key in ("characters", "labels")
    }
    user = [author for author, own in found.items() for _ in own["labels"]]
    return from_tensors(batch, user=user)


clients.words = [chr(code) for code in range(128)]  # shown by privpart audit leakage


def accuracy(module):
    """Return the share of characters of public texts that are predicted."""
    batch = examples("".join(texts(public=True).values())[:20_000])
    return (module(batch["characters"]).argmax(dim=2) == batch["labels"]).float().mean()
