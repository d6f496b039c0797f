"""A small study file on digits, and files that differ from it in some places."""

STUDY = """
schema = "privpart/study/1"
[plan]
schema = "privpart/plan/1"
[plan.privacy]
rounds = 2
clip_norm = 1.0
noise_multiplier = 0.0
delta = 1e-5
mechanism = { name = "tree" }
[plan.model]
name = "small_cnn"
sizes = { channels = [2, 4], hidden = 8, image_size = 8 }
seed = 7
[plan.data]
task = "digits"
users = 100
clients_per_round = 5
[plan.client]
learning_rate = 0.1
[plan.server]
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


def changed(*changes: tuple[str, str], text: str = STUDY) -> str:
    """Return the file with each old part, which must be there, replaced by a new one."""
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text
