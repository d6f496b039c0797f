"""Reports for people: what they say first, what they never say, and that they load nothing."""

import base64
import getpass
import json
import math
import os
import re
import shlex
import shutil
import sys
import tomllib
import zlib
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import NormalDist
from typing import get_args
from unittest.mock import Mock

import pytest
import torch
from page_checks import page_text

from accounting import BinaryTree, Guarantee, Participation
from accounting.checks import ConfigError, MissingExtraError
from accounting.report import AssumptionStatus, up
from privpart import PrivacyPlan, Server, fit
from privpart.cli.pages import decision
from privpart.cli.pages.guarantee import BADGES, LAYERS
from privpart.cli.pages.plots import sweep_figures
from privpart.cli.pages.run import run_page, unreadable_page, without_places
from privpart.cli.registry import _NEEDED as NEEDED
from privpart.run.begin import create_run
from privpart.run.budget_book import AllRuns
from privpart.run.report import run_report, vouched

ROUNDS = 6
CLIENTS = [[f"jane-{i}-4711", f"joe-{i}-4711"] for i in range(ROUNDS)]
SCHEMA = Path(
    os.environ.get("OPENDP_REGISTRY", Path(__file__).parents[3] / "shared/data/registry")
) / "deployments-schema.yaml"  # fmt: skip


class Constant:
    def run(self, task, start):
        for client in task.clients:
            yield task.update(client, torch.full_like(start, 0.1))


PLAN = PrivacyPlan(
    mechanism=BinaryTree(ROUNDS),
    participation=Participation(ROUNDS, 2, 3),
    clip_norm=0.5,
    noise_multiplier=4.0,
    report_goal=2,
)


def made(folder, rounds=ROUNDS, **own):
    facts = {"delta": 1e-6, "parameters": [["layer.weight", [2, 2]]]}
    with create_run(folder, PLAN, facts=facts, **own) as run:
        server = Server(run.plan, torch.zeros(4), source=run.source())
        keys = {name: (folder / name).read_bytes() for name in ("key", "signing-key")
                if (folder / name).exists()}  # fmt: skip
        fit(server, Constant(), CLIENTS[:rounds], commit=run.commit)
    return keys


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of every kind, and the keys that they had."""
    os.environ["PRIVPART_STATE_DIR"] = str(tmp_path_factory.getbasetemp() / "witnesses")
    home = tmp_path_factory.mktemp("somebody's place")
    keys = made(home / "private")
    keys |= {f"{name} of unfinished": key for name, key in made(home / "unfinished", 2).items()}
    made(home / "simulation", seed=4)
    lines = [json.dumps({"round": r, "metrics": {"metric": 0.1 * r}}) for r in range(ROUNDS)]
    (home / "simulation" / "metrics.jsonl").write_text("\n".join(lines))
    (home / "private" / "metrics.jsonl").write_text("\n".join(lines))
    shutil.copytree(home / "private", home / "tampered")
    ledger = (home / "tampered" / "ledger.log").read_text()
    (home / "tampered" / "ledger.log").write_text(ledger.replace('"received": ', '"received": 1'))
    shutil.copytree(home / "private", home / "other model")
    state = next((home / "other model").glob("state-*"))
    state.write_bytes(state.read_bytes()[:-4] + b"\0\0\0\1")
    shutil.copytree(home / "private", home / "cut off")
    (home / "cut off" / "ledger.log").write_bytes(ledger.encode()[:500])
    return home, keys


@pytest.fixture(scope="module")
def pages(runs, privpart):
    """The page of each run as text and as HTML, and what the terminal got."""
    home, _ = runs
    found = {}
    for name, code in (
        *(("private", 0), ("unfinished", 0), ("simulation", 0)),
        *(("tampered", 2), ("other model", 5), ("cut off", 2)),
    ):
        file = home / f"{name}.html"
        done = privpart("report", str(home / name), "--html", str(file), "--format", "json")
        assert done.returncode == code, done.stderr
        found[name] = page_text(file.read_text()), file.read_text(), done
    return found


def test_nobody_and_nothing_secret_is_in_any_report(runs, pages, privpart):
    home, keys = runs
    assert {"key", "signing-key", "key of unfinished"} <= keys.keys()
    reports = [html for _, html, _ in pages.values()]
    reports += [done.stdout for _, _, done in pages.values()]
    for form in (["--format", "table"], ["--format", "csv"], ["--format", "statement"]):
        reports += [privpart("report", str(home / name), *form).stdout for name in pages]
    # with the dash, which no hash and no picture has
    planted = ["-4711", "jane-", str(home), home.name, str(Path.home()) + "/"]
    planted += [getpass.getuser() + "@", str(os.environ["PRIVPART_STATE_DIR"])]
    for key in keys.values():
        planted += [key.hex(), base64.b64encode(key).decode().rstrip("="), str(list(key))]
    for text in reports:
        assert not [secret for secret in planted if secret in text]


def test_a_private_run_says_what_holds_and_the_figures_are_those_of_the_json(pages):
    text, _, done = pages["private"]
    report = json.loads(done.stdout)
    told = report["guarantee"]
    assert text.index("The guarantee is conditional") < text.index("At a glance")
    assert f"epsilon{up(told['epsilon'], 5)}" in text
    assert "1e-06" in text
    for assumption in told["assumptions"]:
        assert assumption["text"] in text
        assert assumption["evidence"] in text
    for sentence in (*told["covered"], *told["not_covered"]):
        assert sentence in text
    for layer in ("Top: epsilon", "Middle: the algorithm", "Bottom: trust"):
        assert layer in text
    assert report["cost"] == {"parameters": 4, "update_bytes": 16, "state_vectors": 2,
                              "draws_per_round": 1.0, "precision": None}  # fmt: skip
    assert "16 bytes" in text
    assert report["plan"] in text
    assert report["head"] in text


HOUSE_WORDS = re.compile(
    r"\b(mu|zero-out|adjacency|fingerprint|divisor|ledger|cohort|grid|sensitivity|clip_norm|clipped|rho"
    r"|report_goal|gradients?|hash|chain|PLD|encoder|asserted)\b"
)
"""Words that only who knows this package or the field's papers understands."""


def begun_run(folder, about):
    facts = {"delta": 1e-6, "population_size": 10_000, "about": about}
    with create_run(folder, PLAN, facts=facts) as run:
        server = Server(run.plan, torch.zeros(4), source=run.source())
        fit(server, Constant(), CLIENTS, commit=run.commit)
    return folder


@pytest.fixture(scope="module")
def stated(runs):
    about = {"model": "a keyboard", "controller": "The Ministry <b>", "purpose": "typing"}
    return begun_run(runs[0] / "stated", about), about


def test_the_first_sheet_answers_the_ten_questions_of_a_privacy_officer(stated, privpart, tmp_path):
    """Each has an answer, or a blank that names what is asked for."""
    run, about = stated
    page = tmp_path / "p.html"
    vouch = ["--vouch", "choices", "--voucher", "Jane Doe"]
    done = privpart("report", str(run), *vouch, "--html", str(page), "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["about"] == about
    html = re.sub("<nav.*?</nav>", "", page.read_text(), flags=re.DOTALL)  # it names the annex, too
    first = page_text(html).partition("Annex, for engineers")[0]
    found = json.loads(done.stdout)["guarantee"]
    most, odds = (float(up(math.exp(found["epsilon"] + more), 3)) for more in (0, math.log(2)))
    today = datetime.now(UTC)
    for question, answers in {
        "1 what was trained, and what for?": ("a keyboard", "purposetyping"),
        "2 who trains and publishes it?": ("not stated: organisation, in [about]",),
        "3 who is responsible for the data, and whom do I ask?": (
            *("The Ministry <b>", "not stated: contact"),
        ),
        "4 whose data, and how many people?": ("not stated: people", "10,000 clients"),
        "5 is the claim supported, and by what?": (
            *("Yes, all of it", "4 enforced, 1 verified, 1 vouched for, 0 not checked"),
        ),
        "6 is the guarantee strong?": ("Reasonable, not strong: epsilon",),
        "7 what may be concluded about one person?": (
            *(f"{most:,g} times as likely", f"by more than a factor of {odds:,g}"),
            "at even odds, is right at most",
        ),
        "8 who vouches, and since when?": (f"Jane Doe, {today:%Y-%m-%d}",),
        "9 what is not covered, and who sees more?": (
            *("other releases about the same people", "the server, every contribution"),
        ),
        "10 until when does it hold, and of what day is this?": (
            *("without end", f"{today:%d %B %Y}"),
        ),
    }.items():
        for answer in answers:
            assert answer in first, question
    assert HOUSE_WORDS.findall(first.partition("Is the claim supported?")[2]) == []


def test_words_for_people_who_decide_are_not_of_the_house():
    assert {code for codes in LAYERS.values() for code in codes} <= decision._PLAIN.keys()
    texts = [*decision._PLAIN.values(), *decision._GLOSSARY.values(), *decision._RESTS_ON.values()]
    assert HOUSE_WORDS.findall(" ".join(texts)) == []


def test_the_first_sheet_says_no_status_stronger_than_the_report(stated):
    """Over every status of each kind of condition; the badge is the one that the annex shows."""
    result = run_report(stated[0])
    for code in ("choices", "noise"):
        for status, (tone, word) in ((s, BADGES[s]) for s in get_args(AssumptionStatus)):
            changed = result.guarantee.with_status(code, status, "a reason")
            sheet = run_page(replace(result, guarantee=changed))
            supported = all(
                a.status in ("enforced", "verified", "vouched") for a in changed.assumptions
            )
            claim, strong = sheet.verdicts
            assert (claim.answer == "Yes, all of it") == (claim.tone == "good") == supported
            assert strong.tone != "good"  # epsilon is above 1
            badges = [item[:2] for s in sheet.sections for block in s.blocks
                      if block.kind == "badged" for item in block.items]  # fmt: skip
            assert (tone, word) in badges
            assert set(badges) == {BADGES[a.status] for a in changed.assumptions}
            if changed.status != "does-not-hold":
                for one, number in Counter(a.status for a in changed.assumptions).items():
                    assert f"{number} {BADGES[one][1]}" in claim.lead[-1]


@pytest.mark.parametrize(
    ("known", "row"),
    [
        ((1, "holds", 5.0), None),
        ((3, "holds", 5.12345678), "epsilon 5.124 together, in 3 runs on this machine"),
        ((2, "not-private", None), "2 runs on this machine, which have no bound together"),
    ],
)
def test_the_first_sheet_has_the_cost_of_all_runs_about_the_people(stated, known, row):
    runs, status, epsilon = known
    together = AllRuns(
        "people", status, runs, epsilon and 1.0, epsilon, "in the terms of the annex"
    )
    sheet = run_page(replace(run_report(stated[0]), all_runs=together)).sections[0]
    facts = dict(sheet.blocks[0].items)
    assert (row is None) == ("all runs about them" not in facts)
    assert row is None or facts["all runs about them"].startswith(row)
    assert HOUSE_WORDS.findall(" ".join(facts.values())) == []


def test_odds_are_bounded_by_the_privacy_loss_itself():
    """Of a Gaussian, whose loss is known, at both ends; the sentence rounds up."""
    for mu in (0.01, 0.3, 1.0, 4.0):
        for delta in (1e-8, 1e-5, 1e-2):
            epsilon = Guarantee(mu).epsilon(delta)
            most = epsilon + math.log(2)
            told = NormalDist().cdf(mu / 2 - most / mu) + NormalDist().cdf(-mu / 2 - most / mu)
            assert told <= (2 + math.exp(-epsilon)) * delta
            sentence = decision.strength_of(epsilon, delta, 0.1, "?", unit="a client").lead[1]
            factor, often = re.search(r"factor of ([\d,.^]+), except with .* 1 in ([\d,]+)",
                                      sentence).groups()  # fmt: skip
            assert "^" in factor or float(factor.replace(",", "")) >= math.exp(most)
            assert 1 / float(often.replace(",", "")) >= told


def test_a_pdf_is_tagged_has_the_decision_on_sheet_one_and_no_address_or_time(
    stated, tmp_path, monkeypatch
):
    weasyprint = pytest.importorskip("weasyprint", exc_type=(ImportError, OSError))
    made = run_page(vouched(run_report(stated[0]), "choices", "Jane Doe"))
    made = replace(made, annex=made.annex[-2:])  # no figure, which take seconds
    made.write(tmp_path / "one.pdf")
    monkeypatch.setattr("fontTools.misc.timeTools.time", Mock(time=lambda: 2e9))
    made.write(tmp_path / "two.PDF")
    assert "SOURCE_DATE_EPOCH" not in os.environ
    pdf = (tmp_path / "one.pdf").read_bytes()
    assert pdf == (tmp_path / "two.PDF").read_bytes()
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL)
    pdf += b"".join(zlib.decompressobj().decompress(s) for s in streams if s[:1] == b"x")
    for mark in (b"/StructTreeRoot", b"/MarkInfo", b"/Lang", b"pdfuaid:part", b"/FontFile"):
        assert mark in pdf
    for folder in (str(tmp_path), str(stated[0]), "file:", getpass.getuser() + "@"):
        assert folder.encode() not in pdf
    sheets = weasyprint.HTML(string=made.html()).render().pages
    assert {(round(s.width * 0.2645833), round(s.height * 0.2645833)) for s in sheets} == {
        (210, 297)
    }
    own = [f"s{i + 1}" for i in range(len(made.sections))]
    assert [name in sheets[0].anchors for name in own] == [True] * len(own)
    assert f"s{len(own) + 1}" in sheets[1].anchors


def test_without_the_library_a_pdf_is_refused_by_the_extras_name(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "weasyprint", None)
    with pytest.raises(MissingExtraError, match=r"privpart\[pdf\]"):
        unreadable_page("damaged", (), tmp_path).write(tmp_path / "p.pdf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("noise", "tone"), [(40.0, "good"), (4.0, "plain"), (0.2, "bad")])
def test_a_weak_guarantee_is_never_green(privpart, tmp_path, noise, tone):
    file = tmp_path / "p.html"
    plan = ["--rounds", "64", "--noise-multiplier", str(noise), "--delta", "1e-6"]
    done = privpart("epsilon", *plan, "--max-participations", "1", "--html", str(file))
    assert done.returncode == 0, done.stderr
    verdicts = re.findall('class="verdict (\\w+)"', file.read_text())
    assert verdicts == ["plain", tone]


def test_facts_that_no_report_could_show_are_refused(tmp_path):
    for about in ("a keyboard", {"colour": "blue"}, {"model": 3}, {"model": "x" * 1001}):
        with pytest.raises(ConfigError, match="must be texts of at most 1,000 characters"):
            create_run(tmp_path / "run", PLAN, facts={"about": about})
    assert not (tmp_path / "run").exists()


def test_what_no_epsilon_covers_is_not_shown(pages):
    for name in ("private", "simulation"):
        text = pages[name][0]
        assert "Updates in the sum" not in text
        assert "metric" not in text.replace("losses, metrics", "")
    assert text.index("A simulation: not private") < text.index("At a glance")


@pytest.mark.parametrize("name", ["cut off", "other model", "tampered"])
def test_a_broken_run_says_so_first_and_shows_no_guarantee(pages, name):
    text, html, _ = pages[name]
    assert 'class="verdict bad"' in html.partition("<main")[0]
    assert "o guarantee" in text.partition("What is wrong")[0]
    rest = re.sub("(whatever|this) epsilon|epsilon is larger than shown", "", text)
    for word in ("At a glance", "differential privacy", "epsilon", "detected", "advantage"):
        assert word not in rest
    assert "1e-06" not in rest


def test_an_unfinished_run_says_how_far_it_is_and_without_a_run_there_is_no_page(
    pages, privpart, tmp_path
):
    text, _, _ = pages["unfinished"]
    assert "has committed 2 of 6 planned rounds. The figures are for all 6" in text
    done = privpart("report", str(tmp_path / "none"), "--html", str(tmp_path / "p.html"))
    assert done.returncode == 2
    assert not (tmp_path / "p.html").exists()


def test_files_are_named_without_their_folders():
    for said, kept in (
        ("/home/jane doe/runs/a/ledger.log: damaged", "ledger.log: damaged"),
        ("cannot open '/var/lib/x/y.json'.", "cannot open 'y.json'."),
        ("schema privpart/run/1, 1/population", "schema privpart/run/1, 1/population"),
    ):
        assert without_places(said, Path("/home/jane doe/runs/a")) == kept


def test_hostile_words_of_a_ledger_are_text(privpart, tmp_path):
    """Whoever makes a folder chooses its inherited assumptions, and signs them."""
    bad = "<img src=https://example.invalid onerror=alert(1)> \x1b[2K \u202e $x^{"
    old = {"code": bad, "text": bad, "status": "verified", "consequence": bad,
           "severity": "critical", "evidence": bad}  # fmt: skip
    with create_run(tmp_path / "r", PLAN, own={"delta": 1e-6, "inherited": [old]}):
        pass
    done = privpart("report", str(tmp_path / "r"), "--html", str(tmp_path / "p.html"))
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "p.html").read_text()
    assert page_text(html).count("onerror=alert(1)") >= 3
    assert "\x1b" not in html + done.stdout
    assert "\u202e" not in html + done.stdout


ABOUT = {
    "url_slug": "digits-2026", "name": "Digits", "data_curators": ["A University"],
    "intended_use": "Shows the machinery.", "description": "A classifier.",
    "data_product_region": "Global", "publication_date": "2026-11-22",
    "unit_is": "a person", "release_type": "One release", "data_source_type": "Static",
    "access_type": "Non-interactive", "actors": "The server.", "data_domain": "Digits.",
    "justification": "An example.", "registry_authors": ["A Person"],
}  # fmt: skip


def filled(**change) -> str:
    """The form of the documentation with every needed answer in it."""
    answers = ABOUT | change
    lines = []
    form = blocks("toml")[-1]
    for line in form.splitlines():
        name = line.partition(" = ")[0]
        lines.append(f"{name} = {json.dumps(answers[name])}" if name in answers else line)
    return "\n".join(lines)


@pytest.fixture
def registered(runs, privpart, tmp_path):
    def run(text, *more, name="private"):
        if text is not None:
            (tmp_path / "about.toml").write_text(text)
        entry = tmp_path / "entry.yaml"
        command = ["report", str(runs[0] / name), "--registry", str(entry), *more]
        done = privpart(*command, "--about", str(tmp_path / "about.toml"))
        return done, json.loads(entry.read_text()) if entry.exists() else None

    return run


def test_an_entry_holds_the_reports_figures_and_the_users_words(registered, pages):
    done, entry = registered(filled())
    assert done.returncode == 0, done.stderr
    report = json.loads(pages["private"][2].stdout)["guarantee"]
    own = entry["deployment"]
    for name, value in own["privacy_loss"]["privacy_parameters"].items():
        assert report[name] <= value <= report[name] * (1 + 1e-5)
        assert len(f"{value:g}".lstrip("0.")) <= 7  # six digits and a point: rounded, as it says
    assert own["privacy_loss"]["privacy_parameters"].keys() == {"epsilon", "delta", "rho"}
    assert (entry["url_slug"], entry["tier"], entry["status"]) == ("digits-2026", 3, "Draft")
    assert own["privacy_loss"]["privacy_unit"] == "one client: a person"
    assert own["deployment_model"]["actors"] == "The server."
    assert own["dp_variant"]["variant_name"] == "Approximate DP"
    for told in report["assumptions"]:
        assert f"{told['code']} ({told['status']})" in own["implementation"]["mechanisms"]
    assert "hyperparameters" in own["implementation"]["preprocessing_and_hyperparameter_tuning"]
    assert "-4711" not in json.dumps(entry)


def test_an_entry_repeats_that_delta_is_too_large(registered):
    done, entry = registered(filled(), "--delta", "0.5", "--allow-large-delta")
    assert done.returncode == 0, done.stderr
    own = entry["deployment"]
    said = own["privacy_loss"]["privacy_parameters_details"]
    assert "Warning: delta=0.5: is 1 / 12 or more" in said  # as many as came
    assert "delta (violated): delta is far below 1 / number" in own["implementation"]["mechanisms"]


@pytest.mark.parametrize("tier", [1, 2, 3])
def test_the_registrys_schema_accepts_an_entry_of_every_tier(registered, tier):
    jsonschema, yaml = map(pytest.importorskip, ("jsonschema", "yaml"))
    if not SCHEMA.exists():
        pytest.skip(f"the registry's schema is not beside this project ({SCHEMA.name})")
    done, entry = registered(filled().replace("tier = 3", f"tier = {tier}"))
    assert done.returncode == 0, done.stderr
    jsonschema.validate(entry, yaml.safe_load(SCHEMA.read_text()))
    assert entry["tier"] == tier


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("url_slug = \"digits-2026\"", 'url_slug = ""'), "tier 3 needs entry.url_slug."),
        (("[basic]", "[basic]\ncolour = 1"), "basic.colour: must be one of"),
        (("[basic]", "[more]\na = 1\n[basic]"), "more.a: must be one of"),
        (("tier = 3", "tier = 4"), "tier=4: must be 1, 2 or 3"),
        (('"2026-11-22"', '"22.11."'), "must be YYYY-MM-DD"),
        (('["A Person"]', '"A Person"'), "must be a list of texts"),
        (('"Shows the machinery."', "3"), "must be a text"),
        (("[basic]", "[basic"), "is not valid TOML"),
    ],
)  # fmt: skip
def test_what_the_user_must_say_is_asked_for_by_name(registered, change, said):
    text = filled()
    assert change[0] in text
    done, entry = registered(text.replace(*change))
    assert (done.returncode, entry) == (2, None)
    assert said in done.stderr


def test_a_run_without_a_guarantee_is_not_registered(registered):
    for name in ("other model", "simulation"):
        done, entry = registered(filled(), name=name)
        assert (done.returncode, entry) == (2, None)
        assert "no guarantee to register" in done.stderr


def test_the_form_of_the_documentation_makes_nothing_up(registered):
    done, entry = registered(None)
    assert (done.returncode, entry) == (2, None)
    assert "about.toml: there is no such file" in done.stderr
    form = blocks("toml")[-1]
    values = tomllib.loads(form)
    assert values.pop("entry") == {"tier": 3, "url_slug": ""}
    assert all(value in ("", []) for table in values.values() for value in table.values())
    done, entry = registered(form)
    assert (done.returncode, entry) == (2, None)
    assert all(key in done.stderr for key in " ".join(NEEDED.values()).split())


def test_the_page_of_a_budget_has_the_figures_of_its_json(privpart, tmp_path):
    file = tmp_path / "p.html"
    plan = ["--rounds", "64", "--noise-multiplier", "4", "--delta", "1e-6"]
    plan += ["--max-participations", "1", "--html", str(file), "--format", "json"]
    done = privpart("epsilon", *plan, "--max-epsilon", "2")
    assert done.returncode == 3
    text = page_text(file.read_text())
    assert "exceeds the limit of 2" in text
    assert f"{json.loads(done.stdout)['mu']:.3f}" in text
    assert privpart("epsilon", *plan).returncode == 0
    assert "Not yet, a plan: epsilon" in page_text(file.read_text())


def blocks(kind: str) -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "reports.md").read_text()
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def test_commands_of_the_documentation_write_their_pages(runs, privpart, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs[0] / "private", tmp_path / "run")
    Path("about.toml").write_text(filled())
    lines = [line.split("  #")[0] for block in blocks("console") for line in block.splitlines()]
    for program, *words in map(shlex.split, lines):
        if program == "privpart" and words[0] in ("report", "epsilon"):
            done = privpart(*words)
            assert done.returncode == 0, done.stderr
    written = {"report.html", "budget.html", "entry.yaml"}
    assert written <= {path.name for path in tmp_path.iterdir()}


def points_of(noises, parts=("full", "head"), mechanisms=("tree", "blt")):
    return [
        {"model.train": part, "mechanism": mechanism, "mean_accuracy": 0.5, "delta": 1e-5,
         "standard_deviation": 0.1, "epsilon": 4 / z if z else None, "noise_multiplier": z}
        for part in parts for mechanism in mechanisms for z in noises
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("noises", "lines", "levels"),
    [([0.0, 1.0, 4.0], 4, 2), ([1.0, 4.0], 4, 0), ([0.0, 1.0], 4, 2), ([0.0], 0, 2)],
)
def test_a_sweep_draws_lines_along_noise_levels_without_and_points_else(noises, lines, levels):
    figure = sweep_figures(points_of(noises), ["model.train", "mechanism", "noise"], ["noise"])
    axes = figure["epsilon"].axes[0]
    data = [line for line in axes.lines if line.get_linestyle() != "None"]
    flat = [line for line in data if list(line.get_xdata()) == [0, 1]]  # across the panel
    drawn = [line for line in data if line not in flat]
    assert (len(drawn), len(flat)) == (lines, levels)
    if lines:
        looks = [(line.get_color(), line.get_linestyle()) for line in drawn]
        assert len({colour for colour, _ in looks}) == len({dash for _, dash in looks}) == 2
        assert looks[0][0] == looks[1][0]
        assert looks[0][1] == looks[2][1]
        assert {line.get_color() for line in flat} <= {colour for colour, _ in looks}
    figure["noise"].draw_without_rendering()
    for nothing in sweep_figures([], ["part"], []).values():
        nothing.draw_without_rendering()
