"""Naive packing of one global batch: the oracle of `wlb.pack`, `.batch_offsets` and `.split_documents`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

import wlb
from oracles.cost import Cost, pairs


class Piece(NamedTuple):
    """`length` tokens of document `id`, from its token `start` on."""

    id: int
    start: int
    length: int


Pair = tuple[Piece, Piece]


@dataclass(frozen=True)
class Plan:
    """What `wlb.Packing` holds, in plain Python."""

    max_tokens: int
    micro_batches: list[list[Piece]]
    costs: list[float]
    assignment: list[int]
    leftover: list[Piece]
    length_fallbacks: int
    document_costs: list[float] = field(repr=False)

    @property
    def tokens(self) -> list[int]:
        """Tokens of each micro-batch."""
        return [sum(piece.length for piece in pieces) for pieces in self.micro_batches]

    @property
    def imbalance(self) -> float:
        """Highest over mean cost of the micro-batches."""
        total = sum(self.costs)
        return max(self.costs) * len(self.costs) / total if total > 0 else 1.0

    @property
    def lower_bound(self) -> float:
        """No packing of the placed pieces has a lower highest cost."""
        return max([sum(self.costs) / len(self.costs), *self.document_costs])

    def plain(self) -> dict[str, Any]:
        """The plan as JSON values; equal to `plain(packing)` when wlb computes the same plan."""
        return {
            "micro_batches": [[list(piece) for piece in pieces] for pieces in self.micro_batches],
            "costs": self.costs,
            "assignment": self.assignment,
            "leftover": [list(piece) for piece in self.leftover],
            "length_fallbacks": self.length_fallbacks,
        }


def plain(packing: wlb.Packing) -> dict[str, Any]:
    """Everything that a `wlb.Packing` decides, as JSON values."""
    return {
        "micro_batches": [[list(piece) for piece in pieces_of(batch)] for batch in packing.micro_batches],
        "costs": packing.costs.tolist(),
        "assignment": packing.assignment.tolist(),
        "leftover": [list(piece) for piece in leftover_of(packing)],
        "length_fallbacks": packing.length_fallbacks,
    }


def pieces_of(batch: wlb.MicroBatch) -> list[Piece]:
    """What a micro-batch holds."""
    return _pieces(batch.document_ids.tolist(), batch.starts.tolist(), batch.lengths.tolist())


def leftover_of(packing: wlb.Packing) -> list[Piece]:
    """What found no place."""
    columns = packing.leftover, packing.leftover_starts, packing.leftover_lengths
    return _pieces(*(column.tolist() for column in columns))


def original(lengths: Sequence[int], *, num_micro_batches: int, max_tokens: int, cost: Cost) -> Plan:
    """Documents in arrival order, concatenated, cut every `max_tokens` tokens."""
    batches: list[list[Piece]] = [[] for _ in range(num_micro_batches)]
    leftover: list[Piece] = []
    position = 0
    for document, length in enumerate(lengths):
        start = 0
        while start < length:
            batch, used = divmod(position, max_tokens)
            full = batch >= num_micro_batches
            room = length if full else max_tokens - used
            piece = Piece(document, start, min(length - start, room))
            (leftover if full else batches[batch]).append(piece)
            start += piece.length
            position += piece.length
    return _plan(lengths, batches, batches, leftover, max_tokens, cost)


def fixed_length(
    lengths: Sequence[int], *, num_micro_batches: int, max_tokens: int, cost: Cost, window: int = 1
) -> Plan:
    """Longest first, to the micro-batch with the least attention among those with room; else split."""
    n = num_micro_batches * window
    batches: list[list[Piece]] = [[] for _ in range(n)]
    work = [0] * n
    room = [max_tokens] * n
    leftover: list[Piece] = []

    def put(batch: int, piece: Piece) -> None:
        batches[batch].append(piece)
        work[batch] += pairs(piece.length, causal=cost.causal)
        room[batch] -= piece.length

    for document in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rest = Piece(document, 0, lengths[document])
        while rest.length > 0:
            fitting = [batch for batch in range(n) if room[batch] >= rest.length]
            roomiest = room.index(max(room))
            if fitting:
                put(min(fitting, key=lambda batch: work[batch]), rest)
                break
            if room[roomiest] == 0:
                leftover.append(rest)
                break
            head = room[roomiest]
            put(roomiest, rest._replace(length=head))
            rest = Piece(document, rest.start + head, rest.length - head)
    return _plan(lengths, [sorted(pieces) for pieces in batches], batches, leftover, max_tokens, cost)


def var_length(lengths: Sequence[int], *, num_micro_batches: int, max_tokens: int, cost: Cost) -> Plan:
    """The paper's Algorithm 1 on one global batch."""
    documents = [Piece(i, 0, length) for i, length in enumerate(lengths)]
    order = sorted(documents, key=lambda piece: -piece.length)
    batches, leftover, fallbacks = algorithm_1(
        order, num_micro_batches=num_micro_batches, max_tokens=max_tokens, cost=cost
    )
    listed = [sorted(pieces) for pieces in batches]
    return _plan(lengths, listed, batches, leftover, max_tokens, cost, length_fallbacks=fallbacks)


def refined(lengths: Sequence[int], *, num_micro_batches: int, max_tokens: int, cost: Cost) -> Plan:
    """Algorithm 1, made better."""
    start = var_length(lengths, num_micro_batches=num_micro_batches, max_tokens=max_tokens, cost=cost)
    return refine(start, lengths, cost=cost)


def refine(start: Plan, lengths: Sequence[int], *, cost: Cost) -> Plan:
    """Plans by slope, for up to three targets; then exchanges with the heaviest micro-batch."""
    ceiling = max(start.costs)
    bound = max([sum_in_order(start.costs) / len(start.costs), *start.document_costs])
    if not start.leftover and ceiling <= bound * 1.0001:
        return start

    def rank(plan: Plan) -> tuple[int, float]:
        return len(plan.leftover), max(plan.costs)

    best = start
    below, above, target = bound, max(bound, ceiling), bound
    for number in range(3):
        # A better plan is enough; if it leaves something over, it is the second that is.
        if best is not start and (not best.leftover or number == 2):
            break
        plan = _by_slope(lengths, start, target, cost)
        if plan is not None and max(plan.costs) <= target:
            above = target
        else:
            below = target
        target = below + (above - below) * 0.5
        if plan is not None and max(plan.costs) <= ceiling:
            best = min(best, plan, key=rank)
    plan = _exchanged(lengths, best, bound * 1.0005, cost)
    return plan if max(plan.costs) < max(best.costs) else best


def refine_pieces(
    listing: Sequence[Piece],
    placed: list[list[Piece]],
    leftover: list[Piece],
    fallbacks: int,
    *,
    max_tokens: int,
    cost: Cost,
) -> Plan:
    """`refine` for pieces of any documents: what `algorithm_1` made of those of `listing` that are in its lists."""
    numbers = {piece: number for number, piece in enumerate(listing)}

    def numbered(pieces: list[Piece]) -> list[Piece]:
        return [Piece(numbers[piece], 0, piece.length) for piece in pieces]

    def named(pieces: list[Piece]) -> list[Piece]:
        return [listing[piece.id] for piece in pieces]

    lengths = [piece.length for piece in listing]
    batches = [numbered(pieces) for pieces in placed]
    listed = [sorted(pieces) for pieces in batches]
    start = _plan(lengths, listed, batches, numbered(leftover), max_tokens, cost, length_fallbacks=fallbacks)
    plan = refine(start, lengths, cost=cost)
    micro_batches = [named(pieces) for pieces in plan.micro_batches]
    return replace(plan, micro_batches=micro_batches, leftover=named(plan.leftover), assignment=[])


def _by_slope(lengths: Sequence[int], start: Plan, target: float, cost: Cost) -> Plan | None:
    """Longest first, to the greatest slope within `target`; else to the least cost."""
    batches: list[list[Piece]] = [[] for _ in start.micro_batches]
    costs = [0.0 for _ in batches]
    room = [start.max_tokens for _ in batches]

    def put(batch: int, piece: Piece) -> None:
        batches[batch].append(piece)
        costs[batch] += cost(piece.length)
        room[batch] -= piece.length

    placed = sorted((piece for pieces in start.micro_batches for piece in pieces), key=lambda x: (-x.length, x.id))
    for piece in placed:
        with_room = [j for j in range(len(batches)) if room[j] >= piece.length]
        within = [j for j in with_room if costs[j] + cost(piece.length) <= target]
        if within:
            put(min(within, key=lambda j: (costs[j] - target) / room[j]), piece)
        elif with_room:
            put(min(with_room, key=lambda j: costs[j]), piece)
        else:
            return None
    leftover = []
    for piece in start.leftover:
        with_room = [j for j in range(len(batches)) if room[j] >= piece.length]
        cheapest = min(with_room, key=lambda j: costs[j], default=-1)
        if with_room and costs[cheapest] + cost(piece.length) <= max(start.costs):
            put(cheapest, piece)
        else:
            leftover.append(piece)
    listed = [sorted(pieces) for pieces in batches]
    return _plan(lengths, listed, batches, leftover, start.max_tokens, cost, length_fallbacks=start.length_fallbacks)


def _exchanged(lengths: Sequence[int], start: Plan, low_enough: float, cost: Cost) -> Plan:
    """The best exchange with the lightest partner that has one, again and again, until all steps are taken."""
    nothing = Piece(len(lengths), 0, 0)
    batches = [sorted(pieces, key=lambda x: (-x.length, x.id)) for pieces in start.micro_batches]
    costs = list(start.costs)
    changed = set()
    steps = min(256, 96 + 40 * len(batches))

    def weigh(*pieces: Piece) -> float:
        one, other = (cost(piece.length) if piece.length > 0 else 0.0 for piece in pieces)
        return one + other

    def best_exchange(heavy: int, light: int, most: int) -> tuple[float, float, Pair, Pair] | None:
        nonlocal steps
        has, offers = [*batches[heavy], nothing], [*batches[light], nothing]
        room = [start.max_tokens - sum(piece.length for piece in batches[j]) for j in (heavy, light)]
        best = None
        least = costs[heavy]
        if most == 1:
            steps = max(0, steps - len(has) - len(offers))
        for i, first in enumerate(has[:-1]):
            for second in has[i + 1 :] if most == 2 else [nothing]:
                given, before = weigh(first, second), least
                if most == 2 and steps == 0:
                    return best
                steps -= most - 1
                for k, third in enumerate(offers) if most == 2 else [(-1, nothing)]:
                    if most == 2 and costs[heavy] - (given - weigh(third, nothing)) >= before:
                        continue
                    if most == 2 and steps == 0:
                        return best
                    steps -= most - 1
                    fourths = offers[k + 1 :] or [nothing]
                    if most == 2 and costs[light] + (given - weigh(third, fourths[0])) >= least:
                        break
                    found = None
                    for fourth in fourths:
                        arriving = first.length + second.length - third.length - fourth.length
                        moved = given - weigh(third, fourth)
                        after = costs[heavy] - moved, costs[light] + moved
                        # Of equals the last that leaves the heavy one the heavier.
                        if -room[0] <= arriving <= room[1] and (
                            found is None or max(after) < max(found[:2]) or after[0] == max(found[:2]) > after[1]
                        ):
                            found = *after, (first, second), (third, fourth)
                    if found is not None and max(found[:2]) < least:
                        best, least = found, max(found[:2])
        return best

    while max(costs) > low_enough:
        heavy = costs.index(max(costs))
        partners = sorted((j for j in range(len(costs)) if costs[j] < costs[heavy]), key=lambda j: costs[j])
        light, found = heavy, None
        for most, light in product((1, 2), partners):
            found = best_exchange(heavy, light, most)
            if found is not None or steps == 0:
                break
        if found is None:
            break
        costs[heavy], costs[light], given, taken = found
        changed |= {heavy, light}
        for pieces, source, target in [(given, heavy, light), (taken, light, heavy)]:
            moving = [piece for piece in pieces if piece is not nothing]
            batches[source] = [piece for piece in batches[source] if piece not in moving]
            batches[target] = sorted([*batches[target], *moving], key=lambda x: (-x.length, x.id))
    listed = [sorted(pieces) for pieces in batches]
    plan = _plan(
        lengths, listed, batches, start.leftover, start.max_tokens, cost, length_fallbacks=start.length_fallbacks
    )
    # Costs of the others stay as they were summed.
    return replace(plan, costs=[plan.costs[j] if j in changed else start.costs[j] for j in range(len(costs))])


def algorithm_1(
    order: Iterable[Piece], *, num_micro_batches: int, max_tokens: int, cost: Cost
) -> tuple[list[list[Piece]], list[Piece], int]:
    """Place pieces one after the other: (pieces of each micro-batch, what does not fit, length fallbacks)."""
    batches: list[list[Piece]] = [[] for _ in range(num_micro_batches)]
    costs = [0.0] * num_micro_batches
    tokens = [0] * num_micro_batches
    leftover: list[Piece] = []
    fallbacks = 0
    for piece in order:
        cheapest = costs.index(min(costs))
        shortest = tokens.index(min(tokens))
        if tokens[cheapest] + piece.length <= max_tokens:
            batch = cheapest
        elif tokens[shortest] + piece.length <= max_tokens:
            batch = shortest
            fallbacks += 1
        else:
            leftover.append(piece)
            continue
        batches[batch].append(piece)
        costs[batch] += cost(piece.length)
        tokens[batch] += piece.length
    return batches, leftover, fallbacks


def best_maximum(costs: Sequence[float], lengths: Sequence[int], *, num_micro_batches: int, max_tokens: int) -> float:
    """The least possible maximum cost, by trying every assignment; infinite when the documents do not fit."""
    best = float("inf")
    for assignment in product(range(num_micro_batches), repeat=len(lengths)):
        tokens = [0] * num_micro_batches
        loads = [0.0] * num_micro_batches
        for batch, length, cost in zip(assignment, lengths, costs, strict=True):
            tokens[batch] += length
            loads[batch] += cost
        if max(tokens) <= max_tokens:
            best = min(best, max(loads))
    return best


def batch_offsets(lengths: Sequence[int], *, tokens_per_batch: int) -> list[int]:
    """Consecutive documents, as many as fit, at least one."""
    offsets = [0]
    tokens = 0
    for i, length in enumerate(lengths):
        if i > offsets[-1] and tokens + length > tokens_per_batch:
            offsets.append(i)
            tokens = 0
        tokens += length
    return [*offsets, len(lengths)] if len(lengths) > 0 else offsets


def split_documents(lengths: Sequence[int], *, max_document_tokens: int) -> list[Piece]:
    """Pieces of at most `max_document_tokens`."""
    return [
        Piece(i, start, min(max_document_tokens, length - start))
        for i, length in enumerate(lengths)
        for start in range(0, length, max_document_tokens)
    ]


def _plan(
    lengths: Sequence[int],
    listed: list[list[Piece]],
    placed: list[list[Piece]],
    leftover: list[Piece],
    max_tokens: int,
    cost: Cost,
    length_fallbacks: int = 0,
) -> Plan:
    """`listed` and `placed` hold the same pieces, in the order to show and in the order to sum costs."""
    assignment = [-1] * len(lengths)
    for batch, pieces in enumerate(listed):
        for piece in pieces:
            if piece.length == lengths[piece.id]:
                assignment[piece.id] = batch
    return Plan(
        max_tokens=max_tokens,
        micro_batches=listed,
        costs=[sum_in_order(cost(piece.length) for piece in pieces) for pieces in placed],
        assignment=assignment,
        leftover=leftover,
        length_fallbacks=length_fallbacks,
        document_costs=[cost(piece.length) for pieces in placed for piece in pieces],
    )


def sum_in_order(values: Iterable[float]) -> float:
    """Plain left-to-right addition; the built-in `sum` compensates rounding from Python 3.12 on."""
    total = 0.0
    for value in values:
        total += value
    return total


def _pieces(ids: list[int], starts: list[int], lengths: list[int]) -> list[Piece]:
    return [Piece(*piece) for piece in zip(ids, starts, lengths, strict=True)]
