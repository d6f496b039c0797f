"""Text inputs: the model and the sentences that a plan or a file names, as token ids."""

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor, nn

from accounting.checks import ConfigError
from attacks import read_update
from attacks.text.observation import vocabulary
from privpart.cli.audit.inputs import given_update, hash_tensors, load_given, own_model
from privpart.cli.audit.options import AuditOptions
from privpart.data.batches import Batch
from privpart.training import own_code, plan_file
from privpart.training.task_data import PlanData, read_task
from privpart.training.training import Training, training

_NOT_COUNTED = -100  # label of a token that no loss counts, as in torch
_MOST_PUBLIC = 2000  # sentences of other clients that guesses are made of
_WHOLE = (*(torch.int64, torch.int32, torch.int16, torch.int8), torch.uint8, torch.uint16)
_NOT_IDS = ("attention_mask", "token_type_ids", "position_ids")

Example = tuple[tuple[int, ...], int | None]  # a sentence, and the label of a classifier


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextInputs:
    """What is attacked: ``tokens`` and ``labels`` are the truth, all other data is public."""

    model: nn.Module
    tokens: Tensor
    labels: Tensor | None
    pad: int | None
    public: list[tuple[int, ...]]
    words: tuple[str, ...]
    views: dict[str, Sequence[str]]
    update: dict[str, Tensor] | None

    def digest(self) -> str:
        """Return a hash of the sentences, the weights and the update."""
        state = hashlib.sha256(repr((self.tokens.tolist(), self.public)).encode())
        if self.labels is not None:
            state.update(repr(self.labels.tolist()).encode())
        hash_tensors(state, self.model.state_dict(), self.update or {})
        return state.hexdigest()


def load_text(
    options: AuditOptions, shown: dict[str, Sequence[str]], words: Path | None = None
) -> TextInputs:
    """Return the model and ``--trials`` batches of sentences, of a plan or of a file.

    Args:
        options: of the audit.
        shown: the views; without any, what a plan trains, or all parameters.
        words: file with the text of each token.

    Raises:
        ConfigError: a plan that does not train on text, too few sentences, or a file that does not
            fit the model.
    """
    wanted = options.batch * (1 if options.gradient else options.trials)
    with redirect_stdout(sys.stderr):  # what own code prints is no part of the result
        if options.plan is not None:
            found = _of_plan(options.plan, options, wanted, shown, words)
        else:
            assert options.model is not None  # noqa: S101  refused by the options
            found = _of_file(own_model(options.model), options, wanted, shown, words)
    if options.weights is not None:
        load_given(found.model, options.weights)
    return found


def _of_plan(
    path: Path,
    options: AuditOptions,
    wanted: int,
    shown: dict[str, Sequence[str]],
    words: Path | None,
) -> TextInputs:
    plan = plan_file.read(path)
    read: list[PlanData] = []

    def keeping(task: str, folder: Path | None, words: int) -> Any:  # noqa: ANN401  as read_task
        found = read_task(task, folder, words)
        read.extend([found] if isinstance(found, PlanData) else [])
        return found

    for reference in plan.references().values():
        typer.echo(f"privpart: imports {reference}", err=True)
    made = training(plan, report=lambda _told: None, read=keeping)
    module = made.model.module
    shown = shown or _trained(made)
    update = given_update(module, options.gradient, options.before)
    if options.tokens is not None:
        return _of_file(module, options, wanted, shown, words)
    if plan.client.loss not in ("cross_entropy", "model"):
        raise ConfigError(
            f"client.loss={plan.client.loss!r}: the audit of text knows cross_entropy and model. "
            "From Python, pass the loss to attacks.text_leakage."
        )
    batches, public = _chosen(made, options, wanted // options.batch)
    tokens, labels, pad = _together([one for batch in batches for one in batch], vocabulary(module))
    return TextInputs(
        model=module,
        tokens=tokens,
        labels=labels,
        pad=pad,
        public=public,
        words=read[0].words if read else _words(plan),
        views=shown,
        update=update,
    )


def _trained(made: Training) -> dict[str, Sequence[str]]:
    """Return the view of what the plan trains, and one per group where groups take turns."""
    shown: dict[str, Sequence[str]] = {"trained": list(made.model.trainable)}
    if len(made.model.groups) > 1:
        shown |= {f"group {i}": list(group) for i, group in enumerate(made.model.groups)}
    return shown


def _words(plan: plan_file.PlanFile) -> tuple[str, ...]:
    """Return the attribute ``words`` of the function that makes the clients; () without one."""
    if plan.data.clients is None:
        return ()
    named = getattr(own_code.load(plan.data.clients, plan.folder), "words", ())
    if isinstance(named, str) or not all(isinstance(word, str) for word in named):
        raise ConfigError(f"{plan.data.clients}: its words must be a list of str, one per token.")
    return tuple(named)


def _chosen(
    made: Training, options: AuditOptions, batches: int
) -> tuple[list[list[Example]], list[tuple[int, ...]]]:
    """Return the first sentences of clients that have enough, and the sentences of the others."""
    attacked: list[list[Example]] = []
    public: list[tuple[int, ...]] = []
    for client in made.clients.ids:
        own = list(_examples(made.clients.examples(client)))
        if options.length is not None:
            length = options.length
            own = [(one[:length], y) for one, y in own if len(one) >= length]
        if len(attacked) < batches and len(own) >= options.batch:
            attacked.append(own[: options.batch])
            continue
        public += [sentence for sentence, _ in own]
        if len(attacked) == batches and len(public) >= _MOST_PUBLIC:
            break
    if len(attacked) < batches:
        raise ConfigError(
            f"batch={options.batch}, trials={batches}: {len(attacked)} clients have so many "
            "sentences; choose fewer trials, a smaller batch, or a smaller length."
        )
    return attacked, public


def _examples(batch: Batch) -> Iterator[Example]:
    """Yield the sentences of a client's examples that token ids alone describe.

    One is left out where labels that no loss counts lie inside it.
    """
    inputs, labels = _parted(batch)
    ids, kept = _ids(inputs)
    for row, y, attended in zip(ids.tolist(), labels.tolist(), kept.sum(1).tolist(), strict=True):
        if not isinstance(y, list):
            yield tuple(row[:attended]), y
        elif y[:attended] == row[:attended]:
            yield tuple(row[:attended]), None
        else:  # each label is the next token
            count = max((i + 1 for i, label in enumerate(y) if label != _NOT_COUNTED), default=0)
            if count and y[: count - 1] == row[1:count] and y[count - 1] >= 0:
                yield (*row[:count], y[count - 1]), None


def _parted(batch: Batch) -> tuple[Any, Tensor]:
    """Return the inputs and the labels of examples."""
    inputs, labels = None, None
    if isinstance(batch, Mapping):
        named = [name for name in ("labels", "label") if name in batch]
        inputs = {name: value for name, value in batch.items() if name not in named}
        labels = batch[named[0]] if len(named) == 1 else None
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, labels = batch
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim > 2:
        raise ConfigError(
            "data: the audit of text needs examples with labels: (inputs, labels) or a dict with "
            "labels, whole numbers of shape (n,) or (n, T)."
        )
    return inputs, labels


def _ids(inputs: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401  of a client's examples
    """Return the token ids (n, T), and which of them the network attends to."""
    named = inputs if isinstance(inputs, Mapping) else {"inputs": inputs}
    ids = {
        name: value
        for name, value in named.items()
        if name not in _NOT_IDS
        and isinstance(value, Tensor)
        and value.ndim == 2
        and not value.is_floating_point()
    }
    found = ids.get("input_ids") if "input_ids" in ids else None
    if found is None and len(ids) == 1:
        (found,) = ids.values()
    other = set(named) - set(ids) - {"attention_mask", "token_type_ids"}
    types = named.get("token_type_ids")
    if found is None or other or (isinstance(types, Tensor) and bool(types.any())):
        raise ConfigError(
            f"data: the inputs are {', '.join(map(str, named))}; the audit of text takes token ids "
            "(n, T), and perhaps an attention_mask. For images, name --model and --data."
        )
    kept = named.get("attention_mask")
    whole = torch.ones_like(found)
    return found, whole if not isinstance(kept, Tensor) else kept.long()


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
                "them with; cut them to one length (--length)."
            )
    tokens = torch.tensor([[*s, *[pad or 0] * (longest - len(s))] for s, _ in examples])
    labels = [y for _, y in examples if y is not None]
    return tokens, torch.tensor(labels) if labels else None, pad


def _of_file(
    model: nn.Module,
    options: AuditOptions,
    wanted: int,
    shown: dict[str, Sequence[str]],
    words: Path | None,
) -> TextInputs:
    path = options.tokens
    assert path is not None  # noqa: S101  refused by the options
    held = read_update(path)
    unknown = held.keys() - {"tokens", "labels", "public"}
    tokens, labels, public = held.get("tokens"), held.get("labels"), held.get("public")
    if tokens is None or unknown:
        raise ConfigError(
            f"tokens={path}: holds {', '.join(held)}; must hold tokens (N, T), and may hold labels "
            "(N,) and public (M, T)."
        )
    for name, value in held.items():
        if value.dtype not in _WHOLE or value.ndim != (1 if name == "labels" else 2):
            raise ConfigError(
                f"tokens={path}: {name} is {value.dtype} {tuple(value.shape)}; must be whole "
                f"numbers {'(N,)' if name == 'labels' else '(N, T)'}."
            )
    if len(tokens) < wanted or (labels is not None and len(labels) != len(tokens)):
        raise ConfigError(
            f"tokens={path}: {len(tokens)} sentences"
            f"{'' if labels is None else f' and {len(labels)} labels'}; --batch and --trials need "
            f"{wanted}."
        )
    others = tokens[wanted:] if public is None else public
    if options.pad is not None and not bool((tokens[:wanted, -1:] == options.pad).any()):
        typer.echo(
            f"privpart: pad={options.pad}: no attacked sentence ends with it; the attacker infers "
            "lengths all the same.",
            err=True,
        )
    texts = () if words is None else _lines(words)
    if words is not None and int(tokens[:wanted].max()) >= len(texts):
        typer.echo(
            f"privpart: words={words}: has {len(texts)} lines; tokens beyond are shown as numbers.",
            err=True,
        )
    return TextInputs(
        model=model,
        tokens=tokens[:wanted].long(),
        labels=None if labels is None else labels[:wanted].long(),
        pad=options.pad,
        public=[_before(row, options.pad) for row in others.tolist()],
        words=texts,
        views=shown or {"full": ["*"]},
        update=given_update(model, options.gradient, options.before),
    )


def _before(row: Sequence[int], pad: int | None) -> tuple[int, ...]:
    end = len(row)
    while pad is not None and end and row[end - 1] == pad:
        end -= 1
    return tuple(row[:end])


def _lines(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text("utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"words={path}: cannot be read: {error}.") from None
