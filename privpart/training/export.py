"""Export: the model that a run released, as a file that plain PyTorch or peft loads.

A file holds the parameters after the last committed round, whose hash the ledger names, so a round
that was not released cannot be exported. Its metadata state what its guarantee is.
"""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from accounting import checks
from accounting.checks import ConfigError
from privpart.plan import PrivacyPlan
from privpart.run.evidence import Evidence, gather
from privpart.run.ledger import LEDGER, Ledger
from privpart.run.report import parameter_sizes, report_of
from privpart.run.selection import refuse_unreleased
from privpart.run.store import damage_named, one_line, read_state

if TYPE_CHECKING:
    from privpart.training.training import Training

PARTS = ("full", "trained", "peft")
_PICKLED = (".pt", ".pth", ".bin", ".pkl", ".ckpt")


def released_parameters(folder: str | Path) -> tuple[Tensor, dict[str, Any]]:
    """Return the server's parameters after the last committed round, and the ledger's facts."""
    path = Path(folder)
    ledger = Ledger(path)
    ledger.rows()
    name, expected = ledger.newest()
    tensors, _ = read_state(path / name, expected)
    with damage_named(path / name):
        return tensors["parameters"].view(-1), ledger.facts


def released_module(folder: str | Path, setup: "Training") -> nn.Module:
    """Return a copy of a training's network with the released parameters, in evaluation mode."""
    parameters, facts = released_parameters(folder)
    if facts.get("rest", setup.model_hash) != setup.model_hash:
        raise ConfigError(f"{folder}: is a run of another network.")
    setup.model.verify()
    setup.model.load(setup.whole(parameters))
    module = deepcopy(setup.model.module)
    # Gradients of a client's last step would say something of that client.
    for parameter in module.parameters():
        parameter.grad = None
        parameter.requires_grad_(parameter.is_floating_point())
    return module.eval()


def export(
    folder: str | Path, out: str | Path, *, part: str = "full", setup: "Training | None" = None
) -> Path:
    """Write the model that a run released.

    Args:
        folder: run folder.
        out: file to write, or folder for "peft"; it must not exist.
        part: "full" writes the state dict of the whole network, "trained" its trained parameters
            by name, "peft" the folder of a peft adapter.
        setup: the run's training; not needed for "trained".

    Raises:
        ConfigError: nothing was released, ``out`` exists, cannot be written or has the suffix of
            a pickle, or the network is not a peft model whose adapter holds all that was trained.
    """
    checks.choice("part", part, PARTS)
    path, ledger = Path(out), Ledger(Path(folder))
    refuse_unreleased(Path(folder), ledger.facts, ledger.chains[-1])
    if path.exists():
        raise ConfigError(f"out={out}: exists; choose another name, or remove it.")
    if part != "peft" and path.suffix in _PICKLED:
        raise ConfigError(
            f"out={out}: {path.suffix} names a pickle, and this writes a safetensors file. Choose "
            f"{path.with_suffix('.safetensors').name}; safetensors.torch.load_file reads it."
        )
    try:
        if part == "trained":
            tensors = _trained(folder)
        elif setup is None:
            raise TypeError(f"part={part}: needs the run's training; pass setup")
        elif part == "peft":
            _export_adapter(folder, path, setup)
            return path
        else:
            # Cloned, so that a tied parameter is written under each of its names.
            values = released_module(folder, setup).state_dict()
            tensors = {name: value.clone().contiguous() for name, value in values.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata=privacy_metadata(folder, part))
    except OSError as error:
        raise ConfigError(f"out={out}: cannot be written: {one_line(error)}.") from None
    return path


def privacy_metadata(
    folder: str | Path, part: str, *, evidence: Evidence | None = None
) -> dict[str, str]:
    """Return what a file says about its run and guarantee, as strings by name.

    A file travels, so its statement is what the ledger shows to somebody who did not see the run
    being made, wherever it is written. ``evidence`` is that of the folder, if it was gathered.
    """
    path = Path(folder)
    shown = gather(path) if evidence is None else evidence
    stated = tuple(
        check if check.status == "wrong" else replace(check, status="verified")
        for check in shown.checks
    )
    shown = replace(shown, origin="unknown", checks=stated)
    facts, rows = shown.facts, shown.rows
    metadata = {
        "format": "pt",
        "privpart.part": part,
        "privpart.run_id": facts["run_id"],
        "privpart.rounds": f"{len(rows)} of {PrivacyPlan.from_dict(facts['plan']).rounds}",
        "privpart.head": shown.head,
        "privpart.public_key": facts["public_key"],
    }
    if not facts["plan"]["noise_multiplier"]:
        statement = "no noise was added, so there is no guarantee"
        return metadata | {"privpart.statement": statement, "privpart.status": "no-guarantee"}
    report = report_of(shown, path)
    guarantee = report.guarantee
    metadata |= {
        "privpart.statement": report.promise(),
        "privpart.status": guarantee.status,
        "privpart.plan": report.plan,
    }
    # No figure stands beside a broken promise.
    if guarantee.status in ("holds", "conditional"):
        metadata |= {
            "privpart.epsilon": repr(guarantee.epsilon),
            "privpart.delta": repr(guarantee.delta),
        }
    return metadata


def _trained(folder: str | Path) -> dict[str, Tensor]:
    """Return the trained parameters by name, from the run folder alone."""
    parameters, facts = released_parameters(folder)
    with damage_named(Path(folder) / LEDGER):
        sizes = parameter_sizes(facts)
    if sizes is None:
        raise ConfigError(
            f"{folder}: its ledger does not name the parameters, which clients that select do not "
            "record. Export the full model."
        )
    if sum(sizes) != parameters.numel():
        raise ConfigError(
            f"{folder}: its ledger names parameters of {sum(sizes)} values, and its model has "
            f"{parameters.numel()}."
        )
    parts = torch.split(parameters, sizes)
    return {
        name: values.view(shape).clone()
        for (name, shape), values in zip(facts["parameters"], parts, strict=True)
    }


def _export_adapter(folder: str | Path, out: Path, setup: "Training") -> None:
    module: Any = released_module(folder, setup)
    if not hasattr(module, "peft_config") or not hasattr(module, "save_pretrained"):
        raise ConfigError(
            f"part=peft: the network is a {type(module).__name__}, not a peft model. Use full."
        )
    from peft import get_peft_model_state_dict

    pointers = {tensor.data_ptr() for tensor in get_peft_model_state_dict(module).values()}
    parameters = dict(module.named_parameters())
    lost = [n for n in setup.model.trainable if parameters[n].data_ptr() not in pointers]
    seeded = set(setup.model.frozen) - set(setup.model.kept)
    lost += [n for n in sorted(seeded) if parameters[n].data_ptr() not in pointers]
    if lost:
        raise ConfigError(
            f"part=peft: an adapter does not hold {lost[0]}"
            f"{f' and {len(lost) - 1} others' if len(lost) > 1 else ''}, which was trained or came "
            "from the seed. Name its layer in modules_to_save, or use full."
        )
    module.save_pretrained(out)
    metadata = privacy_metadata(folder, "peft")
    (out / "privacy.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
