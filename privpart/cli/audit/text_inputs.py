"""Text inputs: the model and the sentences that a plan or a file names, as token ids."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accounting.checks import ConfigError, text_of
from attacks import TextAudit, read_update
from attacks.text.observation import vocabulary, without_padding
from attacks.text_audit import text_suite
from privpart.cli.audit.inputs import from_files, own_model, shared_fields, wanted
from privpart.cli.audit.options import LeakageOptions
from privpart.cli.trainings import tell_of_code
from privpart.data.batches import Batch
from privpart.training import own_code, plan_file
from privpart.training.task_data import PlanData, read_task
from privpart.training.training import training

# Label of a token that no loss counts, as in torch.
_NOT_COUNTED = -100
# Sentences of other clients that guesses are made of.
_MOST_PUBLIC = 2000
_WHOLE = (*(torch.int64, torch.int32, torch.int16, torch.int8), torch.uint8, torch.uint16)
_NOT_IDS = ("attention_mask", "token_type_ids")

# A sentence, and the label of a classifier.
Example = tuple[tuple[int, ...], int | None]


_EXCHANGES = {"quick": 0, "normal": 4000, "long": 40_000}
"""Updates that an attack may compute to put tokens into sentences."""


def text_audit(options: LeakageOptions) -> tuple[TextAudit, tuple[str, ...]]:
    """Return the audit of ``--trials`` batches of sentences, of a plan or of a file, and the words.

    Without a view it is what a plan trains, or all parameters.

    Raises:
        ConfigError: a plan that does not train on text, too few sentences, or a file that does not
            fit the model.
    """
    fields = shared_fields(options, text_suite(exchanges=_EXCHANGES[options.effort]))
    views: Mapping[str, Sequence[str]] = {"full": ["*"]}
    run = None
    # What own code prints is no part of the result.
    with redirect_stdout(sys.stderr):
        if options.plan is not None:
            run = _Planned(options.plan)
            model, views = run.training.model.module, run.views()
        else:
            assert options.model is not None  # noqa: S101  refused by the options
            model = own_model(options.model)
        update, read = from_files(model, options)
        if run is None or options.tokens is not None:
            sentences, words = _of_file(options)
        else:
            sentences, words = run.sentences(options)
    views = options.views or views
    return TextAudit(
        model=model, update=update, read=read, views=views, **sentences, **fields
    ), words


class _Planned:
    """A plan's model and its clients' sentences; its code is imported and run."""

    def __init__(self, path: Path) -> None:
        self.plan = plan_file.read(path)
        self.tasks: list[PlanData] = []

        # The words of a task are read with it, and the training does not keep them.
        def keeping(task: str, folder: Path | None, words: int) -> Any:  # noqa: ANN401  as read_task
            data = read_task(task, folder, words)
            self.tasks.extend([data] if isinstance(data, PlanData) else [])
            return data

        tell_of_code(self.plan)
        self.training = training(self.plan, report=lambda _told: None, read=keeping)

    def views(self) -> dict[str, Sequence[str]]:
        """Return the view of what the plan trains, and one per group where groups take turns."""
        model = self.training.model
        shown: dict[str, Sequence[str]] = {"trained": list(model.trainable)}
        if len(model.groups) > 1:
            shown |= {f"group {i}": list(group) for i, group in enumerate(model.groups)}
        return shown

    def sentences(self, options: LeakageOptions) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the fields of an audit of one batch of each of the first clients, and the words.

        Clients have enough sentences; those of the others are public.
        """
        loss = self.plan.client.loss
        if loss not in ("cross_entropy", "model"):
            raise ConfigError(
                f"client.loss={loss!r}: the audit of text knows cross_entropy and model. "
                "From Python, pass the loss to attacks.text_leakage."
            )
        attacked: list[Example] = []
        public: list[tuple[int, ...]] = []
        count, length = wanted(options), options.keys.length
        for client in self.training.clients.ids:
            examples = list(_examples(self.training.clients.examples(client)))
            if length is not None:
                examples = [(ids[:length], y) for ids, y in examples if len(ids) >= length]
            if len(attacked) < count and len(examples) >= options.batch:
                attacked += examples[: options.batch]
            else:
                public += [sentence for sentence, _ in examples]
            if len(attacked) == count and len(public) >= _MOST_PUBLIC:
                break
        if len(attacked) < count:
            raise ConfigError(
                f"batch={options.batch}, trials={count // options.batch}: "
                f"only {len(attacked) // options.batch} clients have a batch of sentences; choose "
                "fewer trials, a smaller batch, or a smaller length."
            )
        tokens, labels, pad = _together(attacked, vocabulary(self.training.model.module))
        words = self.tasks[0].words if self.tasks else self._words()
        return {"x": tokens, "y": labels, "pad": pad, "public": public}, words

    def _words(self) -> tuple[str, ...]:
        """Return the attribute ``words`` of the function that makes the clients; () without one."""
        clients = self.plan.data.clients
        if clients is None:
            return ()
        words = getattr(own_code.load(clients, self.plan.folder), "words", ())
        if isinstance(words, str) or not all(isinstance(word, str) for word in words):
            raise ConfigError(f"{clients}: its words must be a list of str, one per token.")
        return tuple(words)


def _examples(batch: Batch) -> Iterator[Example]:
    """Yield the sentences of a client's examples that token ids alone describe.

    One is left out where labels that no loss counts lie inside it.
    """
    inputs, labels = _parted(batch)
    ids, mask = _ids(inputs)
    for row, y, attended in zip(ids.tolist(), labels.tolist(), mask.sum(1).tolist(), strict=True):
        if not isinstance(y, list):
            yield tuple(row[:attended]), y
        elif y[:attended] == row[:attended]:
            yield tuple(row[:attended]), None
        else:
            # Each label is the next token.
            count = max((i + 1 for i, label in enumerate(y) if label != _NOT_COUNTED), default=0)
            if count and y[: count - 1] == row[1:count] and y[count - 1] >= 0:
                yield (*row[:count], y[count - 1]), None


def _parted(batch: Batch) -> tuple[Mapping[str, Any], Tensor]:
    """Return the inputs of examples by name, and their labels."""
    inputs, labels = None, None
    if isinstance(batch, Mapping):
        named = [name for name in ("labels", "label") if name in batch]
        inputs = {name: value for name, value in batch.items() if name not in named}
        labels = batch[named[0]] if len(named) == 1 else None
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, labels = batch
        inputs = inputs if isinstance(inputs, Mapping) else {"inputs": inputs}
    counted = isinstance(labels, Tensor) and not labels.is_floating_point()
    if inputs is None or not isinstance(labels, Tensor) or not counted or labels.ndim > 2:
        raise ConfigError(
            "data: the audit of text needs examples with labels: (inputs, labels) or a dict with "
            "labels, whole numbers of shape (n,) or (n, T)."
        )
    return inputs, labels


def _ids(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the token ids (n, T), and which of them the network attends to."""
    ids = [value for name, value in inputs.items() if name not in _NOT_IDS]
    (tokens,) = ids if len(ids) == 1 else (None,)
    types, mask = inputs.get("token_type_ids"), inputs.get("attention_mask")
    # Ids of another meaning, or of two sentences in one, cannot be told from token ids alone.
    if (
        not isinstance(tokens, Tensor)
        or tokens.ndim != 2
        or tokens.is_floating_point()
        or (isinstance(types, Tensor) and bool(types.any()))
    ):
        raise ConfigError(
            "plan: its clients hold no sentences: an audit by --plan is of text, as token ids "
            "(n, T) and perhaps an attention_mask. For images pass --model ./FILE.py:FUNCTION and "
            "--data FILE, with x and y."
        )
    return tokens, mask.long() if isinstance(mask, Tensor) else torch.ones_like(tokens)


def _together(examples: Sequence[Example], words: int) -> tuple[Tensor, Tensor | None, int | None]:
    """Return sentences as (N, T) ids, their labels, and the padding after the shorter ones.

    No position attends to the padding and no loss counts it, so any of the ``words`` ids serves
    that is in no sentence.
    """
    longest = max(len(sentence) for sentence, _ in examples)
    pad = None
    if any(len(sentence) < longest for sentence, _ in examples):
        used = {token for sentence, _ in examples for token in sentence}
        pad = next((token for token in range(words) if token not in used), None)
        if pad is None:
            raise ConfigError(
                "length is missing: the sentences differ in length, and no token is left to pad "
                "them with; cut them to one length (length in --settings)."
            )
    tokens = torch.tensor([[*s, *[pad or 0] * (longest - len(s))] for s, _ in examples])
    labels = [y for _, y in examples if y is not None]
    return tokens, torch.tensor(labels) if labels else None, pad


def _of_file(options: LeakageOptions) -> tuple[dict[str, Any], tuple[str, ...]]:
    path, keys, count = options.tokens, options.keys, wanted(options)
    assert path is not None  # noqa: S101  refused by the options
    tensors = read_update(path)
    if "tokens" not in tensors or tensors.keys() - {"tokens", "labels", "public"}:
        raise ConfigError(
            f"tokens={path}: holds {', '.join(tensors)}; must hold tokens (N, T), and may hold "
            "labels (N,) and public (M, T)."
        )
    for name, value in tensors.items():
        if value.dtype not in _WHOLE or value.ndim != (1 if name == "labels" else 2):
            raise ConfigError(
                f"tokens={path}: {name} is {value.dtype} {tuple(value.shape)}; must be whole "
                f"numbers {'(N,)' if name == 'labels' else '(N, T)'}."
            )
    tokens, labels = tensors["tokens"], tensors.get("labels")
    if len(tokens) < count or (labels is not None and len(labels) != len(tokens)):
        raise ConfigError(
            f"tokens={path}: {len(tokens)} sentences"
            f"{'' if labels is None else f' and {len(labels)} labels'}; --batch and --trials need "
            f"{count}."
        )
    name = f"words={keys.words}"
    words = () if keys.words is None else text_of(keys.words, name, most=10**9).splitlines()
    # Without public sentences, those that are not attacked are public.
    public = tensors.get("public", tokens[count:])
    return {
        "x": tokens[:count].long(),
        "y": None if labels is None else labels[:count].long(),
        "pad": keys.pad,
        "public": [without_padding(row, keys.pad) for row in public.tolist()],
    }, tuple(words)
