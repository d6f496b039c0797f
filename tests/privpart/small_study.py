"""A small plan and study file on digits, and files that differ from them in some places."""

from privpart.study.store import CellResult

PLAN = """
schema = "privpart/plan/1"
[privacy]
rounds = 2
clip_norm = 1.0
noise_multiplier = 1.0
delta = 1e-5
mechanism = { name = "tree" }
[model]
name = "small_cnn"
sizes = { channels = [2, 4], hidden = 8, image_size = 8 }
seed = 7
[data]
task = "digits"
users = 1437
clients_per_round = 6
[client]
learning_rate = 0.1
[server]
learning_rate = 0.3
"""


def changed(*changes: tuple[str, str], text: str | None = None) -> str:
    """Return the study, or a text, with each old part, which must be there, replaced by a new."""
    text = STUDY if text is None else text
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


STUDY = 'schema = "privpart/study/1"\n[plan]' + changed(
    ("\n[", "\n[plan."),
    ("multiplier = 1.0", "multiplier = 0.0"),
    ("users = 1437\nclients_per_round = 6", "users = 100\nclients_per_round = 5"),
    text=PLAN.replace("learning_rate = 0.3\n", ""),
)
STUDY += """\
[arms]
full = { "model.train" = ["*"] }
last = { "model.train" = ["dense2.*"] }
[mechanisms]
tree = { name = "tree" }
[noise]
multiplier = [0.5]
none = true
[tuning]
trials = 3
refine = 2
seeds = [100]
held_out = 20
[tuning.space]
"server.learning_rate" = { low = 0.01, high = 3.0, scale = "log" }
"server.momentum" = [0.0, 0.5]
[final]
seeds = [0, 1, 2, 3, 4]
"""


def result(accuracy: float, **more: object) -> CellResult:
    """Return what a training of a small network gave."""
    values = {
        "accuracy": accuracy, "epsilon": 1.0, "noise_multiplier": 2.0, "delta": 1e-5, "trained": 3,
        "parameter_count": 4, "plan": "{}", "engine": "", "cpu_seconds": 1.0,
    }  # fmt: skip
    return CellResult(**values | more)
