"""Living: nodes that join between rounds, and clients that an operator moves to another node.

Who joins is new to the run, by name. Who is a member moves only by what the operator signed, with
the rounds in which it was: so a name has one history, whoever answers for it. The ledger names each
change, from which a run that is resumed takes it again.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, overload

from accounting.checks import ConfigError, parsed_json
from privpart.flower.agreement import Report, agreement, flower, id_of, id_text, plain_text
from privpart.flower.engine import FlowerEngine
from privpart.flower.mail import Asked, Look, NoAnswerError, listed, pushed, readable, received
from privpart.messages import ClientId
from privpart.run.folder import RunFolder
from privpart.run.members import MOVE, MOVES, OPERATOR, histories, unsealed
from privpart.run.store import HANDLED, read_small
from privpart.training.training import Training

_LONGEST_FILE = 2**26
"""Bytes of the operator's file."""


class Turns(Sequence[Sequence[ClientId]]):
    """Cohorts in turn, see ``cohorts_in_turn``, to which clients may be added.

    A client keeps its turn, so two of its rounds are as far apart as there are turns. A turn with
    more clients than a cohort has takes them in rotation.

    Attributes:
        on_the_way: clients whom nobody asks until they have moved.
    """

    def __init__(self, cohorts: Sequence[Sequence[ClientId]]) -> None:
        self._rounds = len(cohorts)
        again = (number for number in range(1, len(cohorts)) if cohorts[number] is cohorts[0])
        self._turns = [list(cohort) for cohort in cohorts[: next(again, len(cohorts))]]
        self._size = len(cohorts[0])
        self.on_the_way: set[ClientId] = set()

    def add(self, clients: Sequence[ClientId], round_: int) -> None:
        """Add clients to the turns from a round on."""
        for number, client in enumerate(clients):
            self._turns[(round_ + number) % len(self._turns)].append(client)

    def __len__(self) -> int:
        return self._rounds

    @overload
    def __getitem__(self, number: int) -> Sequence[ClientId]: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Sequence[ClientId]]: ...
    def __getitem__(self, number: int | slice) -> Any:
        if isinstance(number, slice):
            return [self[at] for at in range(*number.indices(self._rounds))]
        if not 0 <= number < self._rounds:
            raise IndexError(number)
        turn, times = self._turns[number % len(self._turns)], number // len(self._turns)
        cohort = [turn[(times * self._size + at) % len(turn)] for at in range(self._size)]
        return [client for client in cohort if client not in self.on_the_way]


class Living:
    """What changes in the population of a run while it trains.

    Args:
        engine: asks the nodes; it is told of every change.
        run: keeps them.
        setup: the training, for its cohorts and model.
        moves: path of what the operator signed; None if nobody moves.
        report: gets a sentence about each change, and each that is refused.

    Attributes:
        cohorts: whom to ask in each round.
    """

    def __init__(
        self,
        engine: FlowerEngine,
        run: RunFolder,
        setup: Training,
        moves: str | None,
        report: Report,
    ) -> None:
        self.cohorts = Turns(setup.cohorts)
        self._engine, self._run, self._report = engine, run, report
        self._path, self._read = moves, 0
        self._named = setup.plan.data.population is not None
        self._offers: dict[int, tuple[str, set[ClientId]]] = {}
        self._asked, self._looks = dict[str, Asked](), dict[str, Look]()
        self._agreed = agreement(setup.model, run.plan.hash)
        for move in run.facts.get(MOVES, ()):
            self._apply(move)
        self._met = {*engine.owners.values()}

    def look(self, _: object = None) -> None:
        """Ask nodes that joined which clients they have; take what came of it, and moves."""
        flwr, engine = flower(), self._engine
        question = flwr.RecordDict({"task": flwr.ConfigRecord(dict(self._agreed))})
        for node in sorted({*engine.grid.get_node_ids()} - self._met):
            if name := pushed(engine.grid, "query", question, node, engine.timeout):
                self._asked[name] = Asked(node)
                self._met.add(node)
        for sender, content in received(engine.grid, self._asked, self._looks):
            if sender is not None:
                self._hear(sender.node, content)
        if self._path is not None and Path(self._path).exists():
            self._moves(Path(self._path))

    def settle(self, seconds: float, poll: float) -> None:
        """Look until each node that is new here has said which clients it has."""
        end = time.monotonic() + seconds
        self.look()
        while self._asked and time.monotonic() < end:
            time.sleep(poll)
            self.look()

    def _hear(self, node: int, content: object) -> None:
        try:
            clients, key = listed(content)
        except NoAnswerError:
            self._met.discard(node)
        except Exception as error:
            self._report(f"node {node}: {readable(error)}; it takes no part.")
        else:
            self._joins(node, clients, key)

    def _joins(self, node: int, clients: Sequence[ClientId], key: str) -> None:
        owners = self._engine.owners
        new = [client for client in clients if client not in owners]
        self._offers[node] = key, {*clients}
        if others := len(clients) - len(new):
            self._report(
                f"node {node}: says that it has {others} clients of other nodes. They stay where "
                "they are until the operator signs that they moved."
            )
        if new and not self._named:
            self._report(
                f"node {node}: {len(new)} new clients take no part: the plan names no population "
                "([data] population), so it would be another one with them."
            )
        elif new:
            self._enter(node, key, new, {})

    def _enter(
        self, node: int, key: str, clients: Sequence[ClientId], entry: Mapping[str, str]
    ) -> None:
        """Keep a change, and apply it from the next round on."""
        names = [*map(id_text, clients)]
        move = {"round": self._run.rounds, "node": str(node), "key": key, "clients": names}
        self._run.note_move({**move, "signed": dict(entry)})
        self._apply(self._run.facts[MOVES][-1])
        how = "moved to" if entry else "joined on"
        self._report(f"{len(names)} clients {how} node {node}, before round {move['round']}.")

    def _apply(self, move: Mapping[str, Any]) -> None:
        engine, node = self._engine, int(move["node"])
        clients = [cast("ClientId", id_of(name)) for name in move["clients"]]
        self.cohorts.add([c for c in clients if c not in engine.owners], int(move["round"]))
        engine.owners |= dict.fromkeys(clients, node)
        if move["key"]:
            engine.keys[node] = move["key"]
        if move["signed"]:
            engine.moves.setdefault(node, []).append(move["signed"])

    def _moves(self, path: Path) -> None:
        """Take the moves that the operator added to the file since the last look."""
        done = {move["signed"].get("text") for move in self._run.facts.get(MOVES, ())}
        lines = read_small(path, _LONGEST_FILE).splitlines()
        for number, line in enumerate(lines[self._read :], self._read):
            try:
                entry = parsed_json(line)
                if entry["text"] in done:
                    continue
                if self._is_early(entry):
                    # its node has not said yet which clients it has
                    return
            except (ConfigError, *HANDLED) as error:
                self._report(f"line {number} of {path}: {plain_text(error)}; nobody moves.")
            self._read = number + 1

    def _is_early(self, entry: Mapping[str, str]) -> bool:
        """Make a move; return whether its node is not known yet.

        Raises:
            ValueError: the operator did not sign it, or it lacks rounds of its clients.
        """
        run = self._run
        values = unsealed(entry, run.facts[OPERATOR], MOVE)
        moved = histories(values, plan=run.plan.hash, run=run.facts["run_id"])
        node, taken = int(values["node"]), run.rounds_by_client()
        if node not in self._offers:
            return True
        if all(self._engine.owners.get(client) == node for client in moved):
            # signed more than once, and moved by an earlier line
            return False
        key, offered = self._offers[node]
        for client, rounds in moved.items():
            if client not in self._engine.owners or client not in offered:
                raise ValueError(f"client {client!r} is not on node {node}, or new to the run")
            if not {*taken.get(client, ())} <= {*rounds}:
                self.cohorts.on_the_way |= moved.keys()
                raise ValueError(
                    f"client {client!r} has answered since it was signed. Nobody asks those who "
                    "move until the operator signs again"
                )
        self._enter(node, key, [*moved], entry)
        self.cohorts.on_the_way -= moved.keys()
        return False
