"""A naive stream of global batches with outlier queues: the oracle of `wlb.Packer`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import NamedTuple

from oracles.cost import Cost
from oracles.packing import Piece, Plan, algorithm_1, refine_pieces, split_documents, sum_in_order


class Waiting(NamedTuple):
    """A piece that waits, and the iteration in which it was pushed."""

    piece: Piece
    arrived: int


@dataclass
class NaivePacker:
    """Same arguments and same plans as `wlb.Packer`. Input is taken to be valid."""

    num_micro_batches: int
    max_tokens: int
    cost: Cost
    outlier_thresholds: Sequence[int] = ()
    release: str = "fifo"
    delay_price: float | None = None
    max_delay: int | None = None
    max_document_tokens: int | None = None
    oversize: str = "error"
    method: str = "var_length"

    iteration: int = 0
    next_id: int = 0
    carried: list[Waiting] = field(default_factory=list)
    queues: list[list[Waiting]] = field(default_factory=list)
    log: "Log" = field(default_factory=lambda: Log())

    def __post_init__(self) -> None:
        self.queues = self.queues or self._empty_queues()
        if self.release == "adaptive" and self.max_delay is None:
            self.max_delay = 16

    @property
    def limit(self) -> int:
        """Longest document that is not cut."""
        return self.max_tokens if self.max_document_tokens is None else self.max_document_tokens

    @property
    def waiting(self) -> list[Waiting]:
        """All that was pushed and has not come out."""
        return [*self.carried, *(entry for queue in self.queues for entry in queue)]

    def push(self, lengths: Sequence[int], ids: Sequence[int] | None = None) -> Plan:
        """One global batch."""
        if ids is None:
            ids = range(self.next_id, self.next_id + len(lengths))
        self.next_id = max([self.next_id, *(i + 1 for i in ids)])
        new: list[Waiting] = []
        for i, length in zip(ids, lengths, strict=True):
            for piece in self._cut(Piece(i, 0, length)):
                level = self._level(piece.length)
                (self.queues[level] if level >= 0 else new).append(Waiting(piece, self.iteration))
        released = [entry for level in range(len(self.queues)) for entry in self._release(level)]
        plan = self._step(released, new, in_push=True)

        batch_of = {piece.id: batch for batch, pieces in enumerate(plan.micro_batches) for piece in pieces}
        for i, length in zip(ids, lengths, strict=True):
            waits = any(entry.piece.id == i for entry in self.waiting)
            was_split = self.oversize == "split" and length > self.limit
            plan.assignment.append(-1 if waits or was_split else batch_of[i])
        return plan

    def flush(self) -> list[Plan]:
        """The rest of the stream."""
        plans = []
        while self.waiting:
            released = [entry for queue in self.queues for entry in queue]
            self.queues = self._empty_queues()
            plans.append(self._step(released, [], in_push=False))
        return plans

    def refile(self) -> None:
        """What a change of the configuration does to what waits in the queues."""
        queued = [entry for queue in self.queues for entry in queue]
        self.queues = self._empty_queues()
        for entry in sorted(queued, key=lambda entry: (entry.arrived, entry.piece.id, entry.piece.start)):
            level = self._level(entry.piece.length)
            (self.queues[level] if level >= 0 else self.carried).append(entry)

    def _empty_queues(self) -> list[list[Waiting]]:
        return [[]] if self.release == "adaptive" else [[] for _ in self.outlier_thresholds]

    def _cut(self, piece: Piece) -> list[Piece]:
        if piece.length <= self.limit:
            return [piece]
        if self.oversize == "truncate":
            return [piece._replace(length=self.limit)]
        parts = split_documents([piece.length], max_document_tokens=self.limit)
        return [part._replace(id=piece.id) for part in parts]

    def _level(self, length: int) -> int:
        if self.release == "adaptive":
            return 0
        return sum(length >= threshold for threshold in self.outlier_thresholds) - 1

    def _overdue(self, entry: Waiting) -> bool:
        return self.max_delay is not None and self.iteration - entry.arrived >= self.max_delay

    def _release(self, level: int) -> list[Waiting]:
        queue, released = self.queues[level], []
        if self.release == "adaptive":
            self.queues[level] = []
            return queue
        while len(queue) >= self.num_micro_batches:
            released += [queue.pop(0) for _ in range(self.num_micro_batches)]
        overdue = [entry for entry in queue if self._overdue(entry)]
        self.queues[level] = [entry for entry in queue if not self._overdue(entry)]
        return released + overdue

    def _step(self, released: list[Waiting], new: list[Waiting], in_push: bool) -> Plan:
        listing = self.carried + released + new
        urgent = [entry for entry in released if self._overdue(entry)]
        others = [entry for entry in released if not self._overdue(entry)] + new
        order = [*self.carried, *_longest_first(urgent), *_longest_first(others)]

        if self.release == "adaptive" and in_push:
            first = [*self.carried, *_longest_first(urgent)]
            placed, leftover, fallbacks = adaptive(first, _longest_first(others), self)
            out = {piece for pieces in placed for piece in pieces} | set(leftover)
            self.queues = [[entry for entry in listing if entry.piece not in out]]
            order = [entry for entry in order if entry.piece in out]
        else:
            placed, leftover, fallbacks = algorithm_1(
                [entry.piece for entry in order],
                num_micro_batches=self.num_micro_batches,
                max_tokens=self.max_tokens,
                cost=self.cost,
            )
        plan = Plan(
            max_tokens=self.max_tokens,
            micro_batches=[[entry.piece for entry in listing if entry.piece in pieces] for pieces in placed],
            costs=[sum_in_order(self.cost(piece.length) for piece in pieces) for pieces in placed],
            assignment=[],
            leftover=leftover,
            length_fallbacks=fallbacks,
            document_costs=[self.cost(piece.length) for pieces in placed for piece in pieces],
        )
        if self.method == "refined":
            pieces = [entry.piece for entry in listing]
            plan = refine_pieces(pieces, placed, leftover, fallbacks, max_tokens=self.max_tokens, cost=self.cost)
        self.carried = [entry for entry in order if entry.piece in plan.leftover]
        emitted = [entry for entry in order if entry.piece not in plan.leftover]
        self.log.record(plan, emitted, self.iteration, in_push)
        self.iteration += 1
        return plan


def adaptive(
    urgent: list[Waiting], others: list[Waiting], packer: NaivePacker
) -> tuple[list[list[Piece]], list[Piece], int]:
    """The best of eight cuts, as `algorithm_1` returns it. `others` are longest first; what is in no list waits."""
    n, max_tokens, cost = packer.num_micro_batches, packer.max_tokens, packer.cost
    assert packer.delay_price is not None
    delay_price = packer.delay_price

    def debt(entries: list[Waiting]) -> int:
        return sum(entry.piece.length * (packer.iteration - entry.arrived + 1) for entry in entries)

    def price(waiting: int) -> float:
        return delay_price * float(waiting) / (float(n) * float(packer.limit))

    def loss(heaviest: float, total: float, waiting: int) -> float:
        imbalance = heaviest * n / total if total > 0 else 1.0
        return max(imbalance - 1.0, 0.0) + price(waiting)

    # What must leave: as Algorithm 1 puts it; if not all fits, by tokens alone.
    first = [entry.piece for entry in urgent]
    batches, leftover, fallbacks = algorithm_1(first, num_micro_batches=n, max_tokens=max_tokens, cost=cost)
    if leftover:
        batches, leftover, fallbacks = [[] for _ in range(n)], [], 0
        for piece in first:
            tokens = [sum(p.length for p in pieces) for pieces in batches]
            costs = [sum_in_order(cost(p.length) for p in pieces) for pieces in batches]
            batch = tokens.index(min(tokens))
            if tokens[batch] + piece.length > max_tokens:
                leftover.append(piece)
                continue
            fallbacks += batch != costs.index(min(costs))
            batches[batch].append(piece)
    urgent_tokens = sum(piece.length for pieces in batches for piece in pieces)
    urgent_costs = [sum_in_order(cost(piece.length) for piece in pieces) for pieces in batches]

    # Hold the longest `held` back: what can be hoped for?
    cuts: list[tuple[float, int]] = []
    for held in range(len(others) + 1):
        leaving = [entry.piece.length for entry in others[held:]]
        if leaving:
            heaviest = max([*urgent_costs, cost(leaving[0])])
            total = sum_in_order(urgent_costs) + sum_in_order(cost(length) for length in reversed(leaving))
            beyond = max(0, urgent_tokens + sum(leaving) - n * max_tokens)
            cuts.append((loss(heaviest, total, debt(others[:held]) + beyond), held))
        elif urgent_tokens > 0:
            cuts.append((loss(max(urgent_costs), sum_in_order(urgent_costs), debt(others)), held))

    best: tuple[float, int] | None = None
    answer = batches, leftover, fallbacks
    for _, held in sorted(cuts)[:8]:
        tried = [list(pieces) for pieces in batches]
        tokens = [sum(piece.length for piece in pieces) for pieces in batches]
        costs = list(urgent_costs)
        waiting, elsewhere = others[:held], fallbacks
        everything = sum_in_order(costs) + sum_in_order(cost(entry.piece.length) for entry in reversed(others[held:]))
        for entry in others[held:]:
            added, length = cost(entry.piece.length), entry.piece.length
            cheapest = costs.index(min(costs))
            with_room = [batch for batch in range(n) if tokens[batch] + length <= max_tokens]
            place = min(with_room, key=lambda batch: costs[batch], default=None)
            tolerated = max(costs) + price(debt([entry])) * (everything / n)
            if place is None or (place != cheapest and costs[place] + added > tolerated):
                waiting = [*waiting, entry]
                continue
            elsewhere += place != cheapest
            tried[place].append(entry.piece)
            costs[place] += added
            tokens[place] += length
        found = (loss(max(costs), sum_in_order(costs), debt(waiting)), held)
        if best is None or found < best:
            best, answer = found, (tried, leftover, elsewhere)
    return answer


@dataclass
class Log:
    """Everything that was emitted, for the metrics."""

    steps: list[Plan] = field(default_factory=list)
    delays: list[tuple[int, int]] = field(default_factory=list)
    length_fallbacks: int = 0
    carried_over: int = 0

    def record(self, plan: Plan, emitted: list[Waiting], iteration: int, in_push: bool) -> None:
        """Count one global batch."""
        self.delays += [(iteration - entry.arrived, entry.piece.length) for entry in emitted]
        self.length_fallbacks += plan.length_fallbacks
        self.carried_over += len(plan.leftover)
        if in_push and emitted:
            self.steps.append(plan)

    @property
    def imbalances(self) -> list[float]:
        """Of each step."""
        return [plan.imbalance for plan in self.steps]

    @property
    def memory_skews(self) -> list[float]:
        """Most over mean tokens of the micro-batches of each step."""
        return [max(plan.tokens) * len(plan.tokens) / sum(plan.tokens) for plan in self.steps]

    @property
    def tokens(self) -> int:
        """Tokens emitted."""
        return sum(length for _, length in self.delays)

    @property
    def delay_mean(self) -> float:
        """Mean wait of a token, in iterations."""
        return sum(delay * length for delay, length in self.delays) / self.tokens if self.delays else 0.0

    @property
    def delay_p99(self) -> int:
        """The smallest delay with at least 99 % of the tokens at or below it."""
        covered = 0
        for delay, length in sorted(self.delays):
            covered += length
            if covered * 100 >= 99 * self.tokens:
                return delay
        return 0

    @property
    def delay_histogram(self) -> list[int]:
        """Tokens that waited 0, 1, 2... iterations."""
        longest = max((delay for delay, _ in self.delays), default=-1)
        return [sum(length for delay, length in self.delays if delay == k) for k in range(longest + 1)]

    @property
    def tokens_per_step_cv(self) -> float:
        """Standard deviation over mean of the tokens in a step."""
        tokens = [sum(plan.tokens) for plan in self.steps]
        return pstdev(tokens) / fmean(tokens) if tokens else 0.0


def _longest_first(entries: list[Waiting]) -> list[Waiting]:
    return sorted(entries, key=lambda entry: -entry.piece.length)
