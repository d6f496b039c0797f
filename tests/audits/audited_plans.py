"""Plans that are audited: one for each room of faults, and a hundred that are right."""

from collections.abc import Iterator, Mapping
from itertools import product

BASE = """
schema = "privpart/plan/1"
[privacy]
rounds = 8
clip_norm = 0.5
noise_multiplier = 2.0
delta = 1e-5
{privacy}
[model]
name = "small_cnn"
sizes = {{ channels = [8, 16], hidden = {hidden}, image_size = 8 }}
seed = 7
[data]
task = "digits"
users = {users}
{cohort}
[client]
learning_rate = 0.1
{client}
[server]
learning_rate = 0.3
{more}
"""
ONCE = "max_participations = 1"
TWICE = "max_participations = 2\nmin_separation = 4"
ALWAYS = "max_participations = 8"
LOOP = "batch_size = 8\nepochs = 1"
STEP = "batch_size = 2\nsteps = 1"
STEPS = "batch_size = 2\nsteps = 3"
ADAM = 'batch_size = 8\nepochs = 1\noptimizer = "adam"'
TURNS = "[schedule]\ncycles = 2\nrounds_per_group = 1\nwarm_up = 0\nbetween = 0"
CLIPS = "\nclip_norms = { from_round = [0, 4], value = [0.5, 0.2] }"


def plan(
    mechanism: str, limits: str = TWICE, client: str = LOOP, more: str = "", hidden: int = 64
) -> str:
    """Return a plan of a tree, say, whose cohorts are lists."""
    values = {"users": 1437, "cohort": "clients_per_round = 12", "client": client, "more": more}
    privacy = f"{limits}\nmechanism = {{ {mechanism} }}"
    return BASE.format(privacy=privacy, hidden=hidden, **values)


def sampled(sampler: str, client: str = LOOP, mechanism: str = 'name = "independent"') -> str:
    """Return a plan that draws its cohorts from 200 users."""
    privacy = f"mechanism = {{ {mechanism} }}\nsampling = {{ {sampler} }}"
    values = {"users": 200, "cohort": "", "client": client, "more": "", "hidden": 64}
    return BASE.format(privacy=privacy, **values)


TREE = 'name = "tree", restart_every = 4'
POISSON = 'name = "poisson", expected_batch = 20'
BINS = 'name = "balls-in-bins", bins = 4'
PLANS: Mapping[str, str] = {
    "tree": plan(TREE),
    "once": plan(TREE, ONCE),
    "sums": plan(TREE, client=STEP),
    "large": plan(TREE, hidden=10_000),
    "clips": plan(TREE, TWICE + CLIPS),
    "blt": plan('name = "blt"'),
    "groups": plan('name = "tree"', more=TURNS),
    "poisson": sampled(POISSON),
    "bins": sampled(BINS),
}


def right() -> Iterator[tuple[str, str]]:
    """Yield a hundred plans, by name: mechanism, participation, groups, client, sampler."""
    mechanisms = [
        'name = "tree"',
        TREE,
        'name = "blt"',
        'name = "independent"',
        'name = "toeplitz"',
    ]
    limits = {"once": ONCE, "twice": TWICE, "always": ALWAYS}
    clients = {"loop": LOOP, "one step": STEP, "three steps": STEPS, "adam": ADAM}
    for mechanism, limit, client in product(mechanisms, limits, clients):
        name = f"{mechanism}; {limit}; {client}"
        yield name, plan(mechanism, limits[limit], clients[client])
    for mechanism, limit, client in product(mechanisms[::2], ("once", "twice"), clients):
        name = f"{mechanism} by group; {limit}; {client}"
        yield name, plan(mechanism, limits[limit], clients[client], more=TURNS)
    samplers = [
        POISSON, BINS, BINS + ", redraw = true",
        'name = "truncated-poisson", expected_batch = 10, most = 20',
    ]  # fmt: skip
    for sampler, client in product(samplers, clients):
        yield f"{sampler}; {client}", sampled(sampler, clients[client])
