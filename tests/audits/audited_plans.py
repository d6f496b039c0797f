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
sizes = {{ channels = [8, 16], hidden = 64, image_size = 8 }}
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
GOAL = "report_goal = 12"


def plan(
    mechanism: str, limits: str = TWICE, client: str = LOOP, more: str = "", users: int = 1437
) -> str:
    """Return a plan of a tree, say, whose cohorts are lists."""
    privacy = f"{limits}\nmechanism = {{ {mechanism} }}"
    cohort = "clients_per_round = 12"
    return BASE.format(privacy=privacy, users=users, cohort=cohort, client=client, more=more)


def sampled(sampler: str, client: str = LOOP, mechanism: str = 'name = "independent"') -> str:
    """Return a plan that draws its cohorts from 200 users."""
    privacy = f"mechanism = {{ {mechanism} }}\nsampling = {{ {sampler} }}"
    return BASE.format(privacy=privacy, users=200, cohort="", client=client, more="")


TREE = 'name = "tree", restart_every = 4'
POISSON = 'name = "poisson", expected_batch = 20'
BINS = 'name = "balls-in-bins", bins = 4'
PLANS: Mapping[str, str] = {
    "tree": plan(TREE),
    "once": plan(TREE, ONCE),
    "sums": plan(TREE, client=STEP),
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
