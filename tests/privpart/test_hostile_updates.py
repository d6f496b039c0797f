"""Whatever arrives, a round neither raises nor moves by more than clip_norm for one client."""

import math
from dataclasses import dataclass
from typing import Any, get_args

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import small_plan

from privpart import ClientUpdate, SeededSource, Server
from privpart.messages import Reason

DIM, CLIP, GOAL = 5, 0.5, 4


def server() -> Server:
    plan = small_plan(4, (2, 2), clip_norm=CLIP, report_goal=GOAL)
    return Server(plan, torch.zeros(DIM), source=SeededSource(0))


@dataclass(frozen=True)
class Impostor:
    """Has the fields of an update, and is none."""

    client: int
    update: Any
    round: int
    plan: str


class Rude(torch.Tensor):
    """A tensor that raises whenever it is looked at."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__repr__:
            return "Rude"
        raise RuntimeError("rude")


NUMBERS = st.one_of(
    st.floats(width=32),
    st.sampled_from([math.nan, math.inf, -math.inf, 3e38, -3e38, 1e-45, 0.0]),
)
VECTORS = st.lists(NUMBERS, min_size=DIM, max_size=DIM).map(torch.tensor)
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(torch.ones)
TYPES = st.sampled_from(
    [torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
)
DELTAS = st.one_of(
    VECTORS,
    VECTORS,
    SHAPES,
    st.builds(lambda kind: torch.ones(DIM, dtype=kind), TYPES),
    st.builds(lambda x: torch.ones(DIM, dtype=torch.float64) * x, st.floats(-1e300, 1e300)),
    st.sampled_from(
        [
            None,
            [0.0] * DIM,
            "delta",
            torch.ones(DIM).to_sparse(),
            torch.ones(DIM, device="meta"),
            torch.ones(DIM, requires_grad=True),
            torch.nn.Parameter(torch.full((DIM,), math.nan)),
            torch.ones(1).expand(DIM),
            torch.ones(DIM).as_subclass(Rude),
        ]
    ),
)
IDS = st.one_of(
    st.integers(0, 3),
    st.sampled_from([-1, 2**63, 2**256, True, 1.0, math.nan, "0", "a", "", None, (), [], b"0"]),
)


@st.composite
def messages(draw: Any) -> Any:
    """An update of round 0 or not, of this plan or not, or no update at all."""
    kind = draw(st.sampled_from([ClientUpdate, ClientUpdate, ClientUpdate, Impostor]))
    round_ = draw(st.sampled_from([0, 0, 0, 0, 1, -1, None, 0.0]))
    plan = draw(st.sampled_from(["own", "own", "own", "0" * 64, "", None, b"own"]))
    made = kind(draw(IDS), draw(DELTAS), round_, plan)
    return draw(st.sampled_from([made, made, made, made, made, None, 7]))


def is_from(client: int | str | None, update: Any) -> bool:
    """Also of an id of that value and another type, which is no client and never counts."""
    return type(getattr(update, "client", None)) is type(client) and update.client == client


def after(arrived: list[Any], absent: int | str | None) -> tuple[torch.Tensor, int, int]:
    one = server()
    own = one.task([]).plan
    batch = [
        type(u)(u.client, u.update, u.round, own if u.plan == "own" else u.plan)
        if isinstance(u, ClientUpdate | Impostor)
        else u
        for u in arrived
        if absent is None or not is_from(absent, u)
    ]
    one_more = one.task([]).update(99, torch.zeros(DIM))
    counts = one.run_round([*batch, one_more])
    assert counts.received == len(batch) + 1 == counts.counted + counts.refused
    assert counts.refused == sum(counts.refusals.values())
    assert set(counts.refusals) <= set(get_args(Reason))
    return one.parameters.double() * GOAL, counts.counted, counts.refused


@settings(max_examples=120)
@given(st.lists(messages(), max_size=8), st.sampled_from([0, 1, 2, 3, -1, 2**63, "0", "a"]))
def test_nothing_raises_and_one_client_moves_the_sum_by_at_most_clip_norm(arrived, absent):
    whole, counted, _ = after(arrived, absent=None)
    without, fewer, _ = after(arrived, absent=absent)
    assert bool(torch.isfinite(whole).all())
    assert float((whole - without).norm()) <= CLIP * (1 + 1e-5)  # parameters are float32
    assert counted - fewer in (0, 1)
