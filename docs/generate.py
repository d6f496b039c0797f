"""Pages that are read off the code and the results, written at each build and never committed."""

import ast
import inspect
import json
import re
import types
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum, StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from drawings import drawings
from pydantic import BaseModel
from results import results_page
from rooms import drawing
from tables import markdown, sentence, table

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "accounting": "What a release costs. Without torch.",
    "privpart": "Training part of a model.",
    "privpart.data": "Clients and their examples.",
    "privpart.models": "The papers' networks by name.",
    "privpart.select": "Federated Select: clients that train slices.",
    "attacks": "What leaks from an update, and lower bounds on epsilon.",
}
"""Packages whose public names have an entry each, with what a reader gets there."""
GROUPS = {
    "accounting": {
        "Budgets": (
            "guarantee calibrate Guarantee Participation FixedOrder PrivacyReport Assumption "
            "CrossCheck Realised participation_of"
        ),
        "Mechanisms": (
            "optimize error BinaryTree BufferedToeplitz Toeplitz BandedInverse Independent "
            "Scheduled Dense Grouped PrunedTree Mechanism mechanism_from_dict Sensitivity "
            "PrefixError Workload footprint Footprint"
        ),
        "Sampling": (
            "sampled_guarantee cohorts PoissonSampling ScheduledPoissonSampling BallsInBins "
            "BMinSep ExampleSampling TruncatedPoissonSampling WithoutReplacementSampling "
            "WithReplacementSampling"
        ),
        "Choices and composition": (
            "SelectedGuarantee NegativeBinomialRuns PoissonRuns BinomialRuns ComposedGuarantee "
            "StatedGuarantee composed_events"
        ),
    },
    "attacks": {
        "Audit an update": (
            "leakage text_leakage defences LeakageReport TextReport ImageAudit TextAudit "
            "DefencePoint observe observe_text Observation TextObservation LocalSteps view "
            "View read_update change_of_weights explain psnr ssim reid_rank"
        ),
        "Attacks": (
            "suite for_model dlg cosine_tv invert_dense dense_then_invert april spear "
            "span_test infer_labels Reconstruction ReadText"
        ),
        "Epsilon from below": (
            "replay Replay ServerReplay CanaryLoop LoopAudit canary_clients Canaries coins "
            "guesses clopper_pearson one_run one_run_gdp paired pooled_t Bound worst_view "
            "drifting_view round_covariance"
        ),
        "The released model": "membership lira rmia MembershipScore exposure Exposure",
    },
    "privpart": {
        "Train": (
            "train tune Run PrivacyPlan PartialModel LocalTraining ServerOptimizer Accuracy "
            "TensorBoard StopTraining"
        ),
        "An ordinary PyTorch loop": "FTRLEngine",
        "Over a network": "server_app client_app FlowerEngine sign_move SecureEngine SecureSums",
        "From pieces": (
            "Server fit Users EmbeddedEngine DistributedEngine Engine client_update "
            "ClientUpdate RoundTask RoundRecord RoundCounts SampledCohorts create_run "
            "RunFolder"
        ),
        "Noise and start values": (
            "SecretSource SeededSource NoiseSource NoiseStream Normal Uniform Glorot He Constant"
        ),
        "Errors": "CohortRefusedError CohortTooSmallError DivergedError WorkerError",
        "Adaptive clipping": "AdaptiveClipping",
    },
}
"""Public names by what a reader wants; names in no group follow under "More"."""


def all_pages(folder: Path) -> None:
    """Write all generated pages into ``folder``, leaving those that did not change."""
    from privpart.training.plan_file import PlanFile

    folder.mkdir(exist_ok=True)
    pages = {f"api-{name.replace('.', '-')}": api_page(name) for name in PACKAGES}
    pages |= {
        "cli": cli_page(),
        "plan-file": plan_page(),
        "results": results_page(),
    }
    files = {f"{name}.md": text for name, text in pages.items()}
    files |= {"schemas.txt": schemas_table(), "errors.txt": errors_table()}
    files |= drawings()
    files["plan.schema.json"] = json.dumps(PlanFile.model_json_schema(), indent=1) + "\n"
    for name, text in files.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    drawing().savefig(folder / "rooms.svg", metadata={"Date": None})


# The API


def api_page(name: str) -> str:
    """Return an entry per public name of a package, grouped by what a reader wants, or by kind."""
    package = import_module(name)
    groups = {title: listed.split() for title, listed in GROUPS.get(name, {}).items()}
    grouped = [public for listed in groups.values() for public in listed]
    if gone := sorted(set(grouped) - set(package.__all__)):
        raise ValueError(f"docs/generate.py: GROUPS has names that {name} lacks: {gone}")
    for public in sorted(set(package.__all__) - set(grouped), key=str.lower):
        title = "More" if name in GROUPS else _kind(package, public)
        groups.setdefault(title, []).append(public)
    if name not in GROUPS:
        groups = dict(sorted(groups.items(), key=lambda item: item[0] in ("Errors", "Values")))
    parts = [f"# `{name}`\n\n{markdown(inspect.getdoc(package) or '')}\n"]
    for title, names in groups.items():
        entries = [_entry(name, public, _kind(package, public)) for public in names]
        parts.append(f"## {title}\n\n```{{eval-rst}}\n" + "\n".join(entries) + "```\n")
    return "\n".join(parts)


def _kind(package: types.ModuleType, public: str) -> str:
    value = getattr(package, public)
    if inspect.isclass(value):
        return "Errors" if issubclass(value, Exception) else "Classes"
    return "Functions" if inspect.isroutine(value) else "Values"


def _entry(package: str, name: str, kind: str) -> str:
    owner = package.partition(".")[0]
    if package != owner and name in import_module(owner).__all__:
        return f".. py:class:: {package}.{name}\n   :no-index:\n\n   See `{owner}.{name}`.\n"
    directive = {"Functions": "autofunction", "Values": "autodata", "Errors": "autoexception"}
    options = {
        "Classes": "   :members:\n   :show-inheritance:\n",
        "Errors": "   :show-inheritance:\n",
        "Values": "   :no-value:\n",
    }
    made = directive.get(kind, "autoclass")
    return f".. {made}:: {package}.{name}\n{options.get(kind, '')}"


# The command line


def cli_page() -> str:
    """Return every command with its options, as the parser has them."""
    from privpart.cli.main import app

    root = typer.main.get_command(app)
    parts = [
        "# Commands\n",
        "Standard output carries only the result; progress, warnings and errors go to standard "
        "error. An option that would have no effect is an error. "
        "[Exit codes](../reference/formats.md#exit-codes).\n",
    ]
    panels = ("Train", "Report", "Budget", "Study", "Audit")
    if other := {inner.rich_help_panel for inner in root.commands.values()} - set(panels):
        raise ValueError(f"docs/generate.py: cli_page has no section for {other}")
    for panel in panels:
        parts.append(f"## {panel}\n")
        for name, inner in root.commands.items():
            if inner.rich_help_panel == panel:
                parts.append(_command(f"privpart {name}", inner))
                below = _commands(f"privpart {name}", inner)
                parts += [_command(words, command) for words, command in below]
    return "\n".join(parts)


def _commands(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    for name, inner in getattr(command, "commands", {}).items():
        yield f"{words} {name}", inner
        yield from _commands(f"{words} {name}", inner)


def _command(words: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    line = " ".join([words, *(_metavar(a) for a in arguments), "[OPTIONS]" if options else ""])
    parts = [f"### `{words}`\n", _help(command.help), f"```\n{line.strip()}\n```\n"]
    if getattr(command, "commands", None):
        return "\n".join(parts[:2])
    rows = [(f"`{_metavar(a)}`", "", "", markdown(a.help or "")) for a in arguments]
    rows += [_option(option) for option in options]
    parts.append(table(("option", "values", "default", "meaning"), rows) if rows else "")
    return "\n".join(parts)


def _help(text: str | None) -> str:
    return markdown(inspect.cleandoc(text or "").replace("\b\n", "")) + "\n"


def _metavar(argument: Any) -> str:
    name = argument.name.upper().strip("[]")
    return name if argument.required else f"[{name}]"


def _option(option: Any) -> tuple[str, str, str, str]:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    values = "" if option.is_flag else values_of(option)
    if option.multiple:
        values += ", repeatable"
    idle = option.default in (None, False, [], ()) or callable(option.default)
    default = "" if idle else f"`{getattr(option.default, 'value', option.default)}`"
    required = "**required** " if option.required else ""
    return names, values, default, required + markdown(option.help or "")


def values_of(option: Any) -> str:
    """Return what may be typed after an option: its values by name, or their type."""
    if (described := getattr(option, "type_descriptor", None)) is not None:
        return _values(described.annotation)
    # typer 0.28 and older have click's types
    if choices := getattr(option.type, "choices", ()):
        return ", ".join(str(getattr(choice, "value", choice)) for choice in choices)
    return {"float": "number"}.get(option.type.name, option.type.name)


def _values(annotation: Any) -> str:
    inside = [own for own in get_args(annotation) if own is not type(None)]
    if get_origin(annotation) is Literal:
        return ", ".join(str(one) for one in inside)
    if inside:
        return _values(inside[0])
    if inspect.isclass(annotation) and issubclass(annotation, Enum):
        return ", ".join(str(one.value) for one in annotation)
    return {str: "text", int: "integer", float: "number", Path: "path"}[annotation]


# The plan file


def plan_page() -> str:
    """Return every table and key of a plan file, read off the models that check it."""
    from privpart.plan import PrivacyPlan
    from privpart.training.plan_file import PlanFile

    parts = [
        "# Plan file\n",
        "A plan is a whole training, in TOML. Unknown keys are errors that name the nearest known "
        "key. Keys without a default are needed. Paths are relative to the plan's folder. The same "
        "tables, as a `dict`, are the argument `plan` of `privpart.train`. Editors that check TOML "
        "by a JSON schema can use {download}`plan.schema.json <../generated/plan.schema.json>`.\n",
        "## Top level\n",
        '`schema = "privpart/plan/1"` names the version of the format.\n',
    ]
    meanings = arguments_of(inspect.getdoc(PlanFile) or "")
    for name, field in PlanFile.model_fields.items():
        if name != "plan_schema":
            needed = "needed" if field.is_required() else "optional"
            parts.append(f"- [`[{name}]`](#table-{name}), {needed}: {markdown(meanings[name])}")
    parts.append("")
    promised = arguments_of(inspect.getdoc(PrivacyPlan) or "")
    by_model: dict[type, list[str]] = {}
    for words, model in _tables("", PlanFile):
        by_model.setdefault(model, []).append(words)
    for model, names in by_model.items():
        titles = ", ".join(f"`[{words}]`" for words in names)
        parts += [f"(table-{names[0].replace('.', '-')})=\n\n## {titles}\n"]
        parts += [sentence(inspect.getdoc(model) or "") + "\n", _keys(model, promised)]
    return "\n".join(parts)


def _tables(words: str, model: type) -> Iterator[tuple[str, type]]:
    for name, annotation, _, _ in keys_of(model):
        inner = _table_in(annotation)
        if inner is not None:
            here = f"{words}.{name}" if words else name
            yield here, inner
            yield from _tables(here, inner)


def _table_in(annotation: Any) -> type | None:
    for part in [annotation, *get_args(annotation)]:
        if inspect.isclass(part) and (is_dataclass(part) or issubclass(part, BaseModel)):
            return part
    return None


def keys_of(model: type) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield name, type, default (MISSING if needed) and meaning of each key of a table."""
    meanings = arguments_of(inspect.getdoc(model) or "")
    if issubclass(model, BaseModel):
        for name, field in model.model_fields.items():
            default = field.get_default(call_default_factory=True)
            default = MISSING if field.is_required() else default
            yield name, field.annotation, default, field.description or meanings.get(name, "")
        return
    hints = inspect.get_annotations(model, eval_str=True)
    for own in fields(model):
        default = own.default
        if own.default_factory is not MISSING:
            default = own.default_factory()
        yield own.name, hints[own.name], default, meanings.get(own.name, "")


def _keys(model: type, promised: dict[str, str]) -> str:
    rows = []
    for name, annotation, default, meaning in keys_of(model):
        said = meaning or promised.get(name, "")
        if not said:
            raise ValueError(f"{model.__name__}.{name} of a plan file has no description")
        shown = "" if default is MISSING or default is None else f"`{_toml(default)}`"
        needed = "**needed**" if default is MISSING else shown
        rows.append((f"`{name}`", _type(annotation), needed, markdown(said)))
    return table(("key", "type", "default", "meaning"), rows)


def _toml(value: Any) -> str:
    return json.dumps(getattr(value, "value", value), default=str)


_TOML_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", Path: "path"}


def _type(annotation: Any) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inside[0])
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in inside)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(a) for a in inside if _type(a)))
    if origin in (list, tuple):
        own = _type(inside[0])
        return f"list of {own.replace('list ', 'lists ')}" + "s" * (not own.startswith("list"))
    if origin is dict or annotation is dict or _table_in(annotation):
        return "table"
    if inspect.isclass(annotation) and issubclass(annotation, StrEnum):
        return " or ".join(f'"{one.value}"' for one in annotation)
    return _TOML_TYPES.get(annotation, "")  # functions are for Python only


def arguments_of(docstring: str) -> dict[str, str]:
    """Return what a Google docstring says of each argument or attribute."""
    found = re.search(r"^(?:Args|Attributes):\n((?:[ ]{4}.*\n?|\n)+)", docstring, re.MULTILINE)
    entries = re.findall(
        r"^[ ]{4}(\w+): ((?:.*\n?)(?:[ ]{8}.*\n?|\n(?=[ ]{8}))*)",
        found.group(1) if found else "",
        re.MULTILINE,
    )
    return {name: " ".join(text.split()) for name, text in entries}


# Schemas and errors


WRITTEN_BY = {
    "audit-epsilon": "`privpart audit epsilon`: report.json, `--format json`",
    "budget": "`privpart budget --format json`",
    "costs": "`privpart costs --format json`",
    "defences": "`privpart audit leakage` of images, at levels: defences.json",
    "demo": "`privpart demo`: report.json",
    "doctor": "`privpart doctor --format json`",
    "epsilon": "`privpart epsilon`, `calibrate`, `--format json`; `PrivacyReport.to_dict`",
    "events": "`privpart epsilon --events FILE --format json`",
    "example-level": "state of an `FTRLEngine`, in a run folder",
    "extraction": "`privpart audit extraction`: report.json, `--format json`",
    "flower": "messages between Flower's server and nodes",
    "frontier": "`privpart frontier --format json`, and study.json",
    "leakage": "`privpart audit leakage` of images: report.json, `--format json`",
    "ledger": "ledger.log of a run folder",
    "mechanism": "a mechanism in a file; `Mechanism.to_dict`",
    "mechanisms": "`privpart mechanisms --format json`",
    "membership": "`privpart audit membership`: report.json, `--format json`",
    "move": "what an operator signed of clients that move to another node of a run",
    "node-statement": "statements.log of a run folder: what nodes signed of their answers",
    "noise": "state of a noise stream, in a run folder",
    "own-code": "record of the code that a plan names, in a ledger",
    "plan": "plan files, which people write",
    "run": "`privpart report --format json`",
    "selection": "selection.json of a selection's folder",
    "study": "study files, which people write",
    "sweep": "sweep files, which people write",
    "sweep-table": "`privpart sweep --format json`",
    "text-defences": "`privpart audit leakage` of text, at levels: defences.json",
    "text-leakage": "`privpart audit leakage` of text: report.json, `--format json`",
    "tune": "tune files, which people write",
    "tune-abandoned": "`privpart tune --abandon --format json`",
    "tune-bill": "`privpart tune TUNE.toml --format json`",
    "verify": "`privpart verify --format json`",
    "witness": "`privpart budget --write-witness FILE`",
}
"""Name of each schema -> what is written in it. The build fails if the code has another one."""


def schemas_table() -> str:
    """Return the schema names in the code, with who writes each and the versions."""
    found: dict[str, set[int]] = {}
    for path in _sources():
        for name, number in re.findall(r'"privpart/([a-z-]+)/(\d+)"', path.read_text()):
            found.setdefault(name, set()).add(int(number))
    if unknown := found.keys() ^ WRITTEN_BY.keys():
        raise ValueError(f"docs/generate.py: WRITTEN_BY lacks, or has too many: {sorted(unknown)}")
    rows = [
        (f"`privpart/{name}/{max(found[name])}`", WRITTEN_BY[name], _also(found[name]))
        for name in sorted(found)
    ]
    return "Every document and file names its format in the key `schema`.\n\n" + table(
        ("schema", "written by", "also read"), rows
    )


def _also(versions: set[int]) -> str:
    return ", ".join(f"/{number}" for number in sorted(versions)[:-1])


def errors_table() -> str:
    """Return every exception of the three packages that a caller can meet."""
    import privpart.cli.main as cli

    rows = []
    for path in _sources():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and _is_error(node) and node.name[0] != "_":
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                bases = ", ".join(ast.unparse(base) for base in node.bases)
                says = sentence(ast.get_docstring(node) or "")
                rows.append((f"`{module}.{node.name}`", f"`{bases}`", _code(cli, node.name), says))
    return (
        "A message says what was passed, what is allowed, and what to do. On the "
        "command line an expected error is one sentence and an exit code; a traceback is a defect "
        "of this package.\n\n" + table(("exception", "is a", "exit code", "meaning"), sorted(rows))
    )


def _is_error(node: ast.ClassDef) -> bool:
    return any(re.search(r"(Error|Exception)$", ast.unparse(base)) for base in node.bases)


def _code(cli: Any, name: str) -> str:
    codes = {"ConfigError": 2} | cli._REFUSED | dict.fromkeys(cli._EXPECTED_FAULTS, cli._FAULT)
    return str(codes.get(name, ""))


def _sources() -> list[Path]:
    return [
        path
        for package in ("accounting", "privpart", "attacks")
        for path in sorted((ROOT / package).rglob("*.py"))
    ]
