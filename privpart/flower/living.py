"""Living: nodes that join between rounds, and clients that an operator moves to another node.

Who joins is new to the run, by name. Who is a member moves only by what the operator signed, with
the rounds in which it was: so a name has one history, whoever answers for it. The ledger names each
change, from which a run that is resumed takes it again.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, overload

from accounting.checks import ConfigError, parsed_json
from privpart.flower.agreement import Report, agreement, flower, id_of, id_text, plain_text
from privpart.flower.engine import FlowerEngine
from privpart.flower.mail import Asked, Look, NoAnswerError, listed, pushed, readable, received
from privpart.messages import ClientId
from privpart.run.folder import RunFolder
from privpart.run.members import MOVE, MOVES, OPERATOR, histories, unsealed
from privpart.run.store import HANDLED, one_line, read_small
from privpart.training.training import Training

_LONGEST_FILE = 2**26
"""Bytes of the operator's file."""
_DAY = 86_400.0


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


@dataclass(slots=True)
class _Move:
    """What the operator signed in a line of the file, and has not happened yet.

    Attributes:
        line: its number.
        node: who has the clients now.
        rounds: in which each client took part.
        entry: the text and its signature.
        is_asked: whether the node was asked once more which clients it has.
        is_told: whether the log of the run says that it waits.
    """

    line: int
    node: int
    rounds: Mapping[ClientId, Sequence[int]]
    entry: Mapping[str, str]
    is_asked: bool = False
    is_told: bool = False


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
        self._waiting: list[_Move] = []
        self._named = setup.plan.data.population is not None
        self._offers: dict[int, tuple[str, set[ClientId]]] = {}
        self._asked, self._looks = dict[str, Asked](), dict[str, Look]()
        self._agreed = agreement(setup.model, run.plan.hash)
        for move in run.facts.get(MOVES, ()):
            self._apply(move)
        self._met = {*engine.owners.values()}
        self._waited = dict[int, float]()

    def look(self, _: object = None) -> None:
        """Ask nodes that joined which clients they have; take what came of it, and moves."""
        for node in sorted({*self._engine.grid.get_node_ids()} - self._met):
            self._ask(node)
        for sender, content in received(self._engine.grid, self._asked, self._looks):
            if sender is not None:
                self._hear(sender.node, content)
        if self._path is not None and Path(self._path).exists():
            self._take_lines(Path(self._path))
        taken = self._run.rounds_by_client() if self._waiting else {}
        for move in [*self._waiting]:
            if self._is_over(move, taken):
                self._waiting.remove(move)

    def _ask(self, node: int) -> bool:
        """Ask a node which clients it has; return whether the message was taken."""
        engine = self._engine
        question = flower().RecordDict({"task": flower().ConfigRecord(dict(self._agreed))})
        # the answer is looked for after the next round, which may take several times the timeout
        wait = 2 * self._waited.get(node, engine.timeout)
        self._waited[node] = max(2 * engine.timeout, min(wait, _DAY))
        name = pushed(engine.grid, "query", question, node, self._waited[node])
        if name is not None:
            self._asked[name] = Asked(node)
            self._met.add(node)
        return name is not None

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
        if why := self._other_key(node, key):
            self._report(f"node {node}: {why}; it takes no other part than before.")
            return
        new = [client for client in clients if client not in owners]
        self._offers[node] = key, {*clients}
        if others := sum(owners.get(client, node) != node for client in clients):
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

    def _other_key(self, node: int, key: str) -> str:
        """Return what is wrong with the key of a node's ledger, or ""."""
        was = self._engine.keys.get(node, key)
        return "" if key == was else "its ledger has another key than the run names for it"

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

    def _take_lines(self, path: Path) -> None:
        """Read what the operator added to the file since the last look; a signature once."""
        try:
            data = read_small(path, _LONGEST_FILE)
        except OSError as error:
            self._report(f"moves: {path} cannot be read: {one_line(error)}; nobody moves.")
            return
        # what is being appended has no end yet
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        done = {move["signed"].get("text") for move in self._run.facts.get(MOVES, ())}
        for number in range(self._read, len(lines)):
            self._read = number + 1
            try:
                move = self._signed(number, lines[number])
            except (ConfigError, *HANDLED) as error:
                self._report(f"line {number} of {path}: {plain_text(error)}; nobody moves.")
                continue
            # the operator's last word about a client holds
            for older in [one for one in self._waiting if one.rounds.keys() & move.rounds.keys()]:
                self._waiting.remove(older)
                self._report(f"line {older.line} of {path}: line {number} takes its place.")
            if move.entry["text"] not in done:
                self._waiting.append(move)

    def _signed(self, number: int, line: bytes) -> _Move:
        """Return what the operator signed in a line.

        Raises:
            ValueError: it is of somebody else, or another run.
        """
        run, said = self._run, parsed_json(line)
        entry = {name: said[name] for name in ("text", "signature")}
        values = unsealed(entry, run.facts[OPERATOR], MOVE)
        rounds = histories(values, plan=run.plan.hash, run=run.facts["run_id"])
        return _Move(number, int(values["node"]), rounds, entry)

    def _is_over(self, move: _Move, taken: Mapping[ClientId, Sequence[int]]) -> bool:
        """Make a move if its node says that it has the clients; return whether it is settled."""
        engine, node = self._engine, move.node
        if all(engine.owners.get(client) == node for client in move.rounds):
            # signed more than once, and moved by another line
            return True
        key, offered = self._offers.get(node, ("", set[ClientId]()))
        if not move.rounds.keys() <= offered and not move.is_asked:
            # it may have got them since it was asked
            is_on_its_way = any(to.node == node for to in self._asked.values())
            if node in engine.grid.get_node_ids() and not is_on_its_way:
                self._offers.pop(node, None)
                move.is_asked = self._ask(node)
            return self._tell_waits(move)
        if node not in self._offers:
            return self._tell_waits(move)
        if why := self._why_not(move, offered, taken):
            self._report(f"line {move.line} of {self._path}: {why}; nobody moves.")
            return True
        self._enter(node, key, [*move.rounds], move.entry)
        self.cohorts.on_the_way -= move.rounds.keys()
        return True

    def _why_not(
        self,
        move: _Move,
        offered: Collection[ClientId],
        taken: Mapping[ClientId, Sequence[int]],
    ) -> str:
        """Return what is wrong with a move, or ""."""
        for client, rounds in move.rounds.items():
            if client not in self._engine.owners or client not in offered:
                return f"client {client!r} is not on node {move.node}, or new to the run"
            if not {*taken.get(client, ())} <= {*rounds}:
                self.cohorts.on_the_way |= move.rounds.keys()
                return (
                    f"client {client!r} has answered since it was signed. Nobody asks those who "
                    "move until the operator signs again"
                )
        return ""

    def _tell_waits(self, move: _Move) -> bool:
        if not move.is_told:
            self._report(
                f"line {move.line} of {self._path}: waits until node {move.node} is connected and "
                "says which clients it has."
            )
            move.is_told = True
        return False
