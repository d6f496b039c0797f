"""The documents: their code runs, their commands exist, what they show is what is printed.

Cells of notebooks run in ``make docs``, which fails with them; here their commands are only parsed.
"""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))  # for its generator of pages
GENERATED = ROOT / "docs" / "generated"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if not p.is_relative_to(GENERATED)),
]
TAKES_A_MINUTE = "mechanisms "
"""tests/cli/test_mechanisms.py compares what that command prints."""
NEEDS_MORE = {"docs/how-to/flower.md"}
"""Blocks of Python that are parts of an app of Flower's."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


def is_notebook(path: Path) -> bool:
    return text_of(path).startswith("---\nfile_format: mystnb")


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text_of(path), re.DOTALL)


def shown(path: Path) -> list[tuple[str, str]]:
    """Return commands that a document shows with what they print."""
    return re.findall(r"```\n\$ privpart (.*?)\n(.*?)```", text_of(path), re.DOTALL)


def compare(printed: str, said: str) -> None:
    """Compare without blank lines; a document may break off with a line of three dots."""
    lines = [line.rstrip() for line in printed.splitlines() if line.strip()]
    wanted = [line for line in said.splitlines() if line.strip()]
    if wanted[-1].strip() == "...":
        wanted = wanted[:-1]
        lines = lines[: len(wanted)]
    assert lines == wanted


# torch's, of Opacus's hooks: the input of the first layer needs no gradient
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(
    "document", [p for p in DOCUMENTS if python_blocks(p) or shown(p)], ids=name_of
)
def test_python_blocks_run_and_commands_print_what_is_shown(
    document, privpart, tmp_path, monkeypatch
):
    """Blocks run in order, in one folder; then the commands, which may read what they wrote."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in python_blocks(document) if name_of(document) not in NEEDS_MORE else ():
        exec(compile(block, name_of(document), "exec"), names)
    for command, said in shown(document):
        if not command.startswith(TAKES_A_MINUTE):
            compare(privpart(*shlex.split(command)).stdout, said)


def lines_of_shell(path: Path) -> list[str]:
    """Return the lines of fenced and indented blocks, with continued lines as one."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text_of(path), re.DOTALL | re.MULTILINE)
    outside = re.sub(r"^```.*?^```", "", text_of(path), flags=re.DOTALL | re.MULTILINE)
    indented = [line[4:] for line in outside.splitlines() if line.startswith("    ")]
    blocks.append("\n".join(indented))
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def spans_of(path: Path) -> list[str]:
    """Return the code that stands in sentences and tables, each on one line."""
    prose = re.sub(r"^```.*?^```", "", text_of(path), flags=re.DOTALL | re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]


def commands_in(lines: list[str]) -> list[list[str]]:
    """Return the words of every call of privpart, up to a pipe or a comment."""
    found = []
    for typed in lines:
        line = re.sub(r"^(\$|time|timeout -s KILL \d+) ", "", typed.strip())
        if line.startswith("privpart ") and not line.startswith("privpart:"):
            call = re.split(r" (?:\||\|\||2?>|&&|#)|  +(?=[a-z])|; ", line)[0]
            found.append(shlex.split(call.replace("[", "").replace("]", ""))[1:])
    return found


def commands_of(path: Path) -> list[list[str]]:
    """Return the words of every call of privpart that a document has a reader type."""
    return commands_in(lines_of_shell(path))


@pytest.fixture(scope="module")
def parser():
    """Return the command line's parser: names of commands, and the options of each."""
    import typer

    from privpart.cli.main import app

    return typer.main.get_command(app)


def options_of(command: Any) -> dict[str, Any]:
    return {o: p for p in command.params for o in [*p.opts, *p.secondary_opts]} | {"--help": None}


def checked(parser: Any, words: list[str]) -> set[str]:
    """Return the options of a typed command, which exists and has those that were typed."""
    import generate

    command, rest = parser, list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    assert command is not parser or words[0] == "--version", words
    options = options_of(command)
    typed = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    assert not set(typed) - options.keys(), (words, sorted(set(typed) - options.keys()))
    for option, value in pairwise(rest):
        parameter = options.get(option) if option.startswith("-") else None
        if parameter is not None and not parameter.is_flag:
            *names, last = generate.values_of(parameter).split(", ")
            assert not names or value in (*names, last) or value.isupper(), (words, option, value)
    return set(options)


def options_of_others(path: Path) -> set[str]:
    """Return options of a page's other tools: typed there, or in the source of a script."""
    lines = [*lines_of_shell(path), *spans_of(path)]
    scripts = {
        name for line in lines for name in re.findall(r"\b(?:benchmarks|examples)/\S+\.py", line)
    }
    sources = [(ROOT / script).read_text() for script in scripts]
    typed = [line for line in lines if not re.match(r"(\$ )?privpart |--", line.strip())]
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", "\n".join([*sources, *typed])))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_in_documents_exist_with_their_options(document, parser):
    """In blocks, cells and sentences. An option alone is one of a command that the page names."""
    spans = spans_of(document)
    known = options_of_others(document)
    for words in [*commands_of(document), *commands_in(spans)]:
        known |= checked(parser, words)
    alone = {span.split()[0].partition("=")[0] for span in spans if re.match("--[a-z]", span)}
    assert not alone - known


def test_commands_in_help_exist_with_their_options(parser):
    examples = [
        " ".join(line.split()).removeprefix("Example: ")
        for words in commands_below(parser)
        for line in (at(parser, words).help or "").split("\n\n")
    ]
    found = commands_in(examples)
    assert len(found) > 15
    for words in found:
        checked(parser, words)


def test_make_targets_in_documents_exist():
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        typed = [*spans_of(document), *(line.strip() for line in lines_of_shell(document))]
        named = {match[1] for own in typed if (match := re.match(r"make ([a-z-]+)", own))}
        assert not named - targets, name_of(document)


def commands_below(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands_below(inner, (*words, name))


def at(parser: Any, words: tuple[str, ...]) -> Any:
    """Return the command that these words name."""
    for word in words:
        parser = parser.commands[word]
    return parser


def test_help_shows_all_of_its_text(parser):
    """Rich would take [table] for markup, and print nothing."""
    from privpart.cli.main import app

    wide = {"COLUMNS": "4000", "TERMINAL_WIDTH": "4000", "TERM": "dumb"}
    count = 0
    for words in commands_below(parser):
        command = at(parser, words)
        printed = CliRunner().invoke(app, [*words, "--help"], env=wide).output
        shown = " ".join(re.sub("[│╭╮╰╯─]", " ", printed).split())
        for text in (command.help, *(parameter.help for parameter in command.params)):
            count += 1
            assert " ".join((text or "").split()) in shown, words
    assert count > 100


def test_exit_codes_are_those_of_the_command_line():
    from privpart.cli import main

    listed = re.findall(r"^\| (\d+) \|", text_of(ROOT / "docs/reference/formats.md"), re.MULTILINE)
    named = re.findall(r"(?:^|  ) {4}(\d+)  +[a-z]", main.__doc__ or "", re.MULTILINE)
    assert sorted(map(int, listed)) == sorted(map(int, named))
    refused = {int(code) for code in re.findall(r"\d+", str(main._REFUSED.values()))}
    assert refused <= set(map(int, listed))


def test_the_readme_is_short_and_each_of_its_commands_is_run_somewhere():
    readme = ROOT / "README.md"
    assert len(text_of(readme).splitlines()) <= 150
    cells = [p for p in DOCUMENTS if is_notebook(p)]
    run = {tuple(words) for p in cells for words in commands_of(p)}
    run |= {tuple(shlex.split(command)) for command, _ in shown(readme)}
    names = {"mine-run": "run", "mine.safetensors": "model.safetensors"}
    of_readme = [tuple(names.get(word, word) for word in words) for words in commands_of(readme)]
    cells_named = {tuple(names.get(word, word) for word in words) for words in run}
    assert len(of_readme) >= 6
    assert not set(of_readme) - cells_named
    lines = [line for line in python_blocks(readme)[0].splitlines() if line.strip()]
    assert 5 < len(lines) <= 10
    assert any("train(" in line for line in lines)
    assert not any(";" in line for line in lines)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_between_documents_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text_of(document))
    there = [document.parent / link for link in links if not re.match(r"[a-z]+:", link)]
    generated = {GENERATED / name for name in generated_names()}
    assert not [str(p) for p in there if not (p.exists() or p.resolve() in generated)]


@cache
def generated_names() -> frozenset[str]:
    """Return the files that the build writes, without writing them."""
    import generate

    pages = {f"api-{name.replace('.', '-')}.md" for name in generate.PACKAGES}
    return frozenset(pages | {f"{n}.md" for n in ("cli", "plan-file", "results")})


def test_claims_of_the_papers_page_are_those_of_the_pages_that_it_cites():
    papers, study, fedpt = (
        text_of(ROOT / "docs" / name) for name in ("papers.md", "study.md", "fedpt.md")
    )
    results = json.loads(text_of(ROOT / "benchmarks/results/partial_training.json"))["rows"]
    full, *_, frozen = [round(row["peak_bytes"] / 2**20) for row in results]
    for quoted, page in (
        ("-0.48 ± 0.61", fedpt),
        ("2.0", fedpt),
        ("-2.7", study),
        ("[-3.2, -2.1]", study),
        (f"{frozen} MiB at most instead of {full}", fedpt),
    ):
        assert quoted in papers, quoted
        assert quoted in page, quoted


def test_every_page_is_in_the_table_of_contents():
    listed = set(re.findall(r"^([a-z][a-z/0-9-]*)$", text_of(ROOT / "docs" / "index.md"), re.M))
    pages = {
        str(p.relative_to(ROOT / "docs").with_suffix(""))
        for p in DOCUMENTS
        if p.is_relative_to(ROOT / "docs")
    }
    assert not pages - listed - {"index"}
    assert listed - pages <= {f"generated/{name[:-3]}" for name in generated_names()}


def test_pages_for_users_are_few():
    """Evidence and the project's own pages are apart."""
    captions = text_of(ROOT / "docs" / "index.md").split(":caption: ")[1:]
    pages = {part.split("\n")[0]: re.findall(r"^[a-z/0-9-]+$", part, re.M) for part in captions}
    assert {"mutants", "audited-faults", "published-budgets"} <= set(pages.pop("Evidence"))
    pages.pop("Project")
    assert 1 + sum(len(listed) for listed in pages.values()) <= 30


def test_pages_are_generated_from_the_code(tmp_path):
    """Every plan key has a meaning and every schema an owner, or this raises."""
    import generate
    from drawings import drawings

    generate.all_pages(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == generated_names() | {
        "plan.schema.json",
        "schemas.txt",
        "errors.txt",
        *drawings(),
        "rooms.svg",
    }
    sweep = (tmp_path / "results.md").read_text()
    assert "| full | blt | 1.13 | 1.13 | 6.721 |" in sweep  # 6.7203, rounded up
