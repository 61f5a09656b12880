"""Checks that all ranks of a pipeline run the same micro-batches, before a rank sends what another may not take."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Sequence
from typing import Final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from wlb._errors import error
from wlb.torch.pipeline.micro_batch import PipelineMicroBatch

SLOTS: Final = 64  # keys of the store, used in turn; a rank that is further behind does not compare


class _Group:
    """State of a pipeline on this rank: the number of steps, and the contents of the slots, the next step's first.

    It has its own connection to the store, because a connection on which another thread waits takes no other request.
    """

    def __init__(self, store: Store) -> None:
        self.store = store.clone()
        self.steps = 0
        self.found = deque([""] * SLOTS, SLOTS)


# By store, then by name.
_groups: WeakKeyDictionary[Store, dict[str, _Group]] = WeakKeyDictionary()


def check_same(group: dist.ProcessGroup | None, micro_batches: Sequence[PipelineMicroBatch], how: str) -> None:
    """Raises if another rank of the pipeline, which came first, has other micro-batches or runs them differently.

    An activation longer than expected ends the process, a shorter one leaves a stale tail, so neither may be sent. The
    first rank to come stores its micro-batches, and the others compare. No rank waits for another.

    Args:
        group: the ranks of the pipeline.
        micro_batches: of the step.
        how: name of the schedule.

    Raises:
        wlb.WlbError: on the ranks that differ from the first one; it names that rank. The other ranks wait for these in
            vain, until their processes end or the group times out.

    Complexity:
        One round trip to the store, if there is more than one rank.
    """
    if dist.get_world_size(group) == 1:
        return
    group = group or dist.distributed_c10d._get_default_group()
    name = f"{group.group_name}/{dist.get_process_group_ranks(group)[0]}"  # some ranks' groups are named alike
    store = dist.distributed_c10d._get_default_store()
    groups = _groups.setdefault(store, {})
    if name not in groups:
        groups[name] = _Group(store)
    known = groups[name]
    known.steps += 1
    number, found = known.steps, known.found[0]
    tokens = [micro_batch.tokens for micro_batch in micro_batches]
    digest = hashlib.blake2b(repr((tokens, how)).encode(), digest_size=16).hexdigest()
    text = f"{len(tokens)} of {sum(tokens)} tokens by {how}"
    mine = json.dumps([number, digest, dist.get_rank(), text])
    key = f"wlb/micro_batches/{name}/{number % SLOTS}"
    if not found or json.loads(found)[0] < number:
        # The first rank writes its plan over the slot's old content; the others compare with it.
        found = known.store.compare_set(key, found, mine).decode()
    known.found.append(found)
    step, theirs, rank, what = json.loads(found)
    if step == number and theirs != digest:
        raise error("micro_batches", f"differ from those of rank {rank}: here {text}, there {what}", value=tokens)
