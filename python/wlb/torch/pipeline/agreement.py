"""Do all ranks of a pipeline run the same micro-batches? Each asks before it sends what another may not take."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Final

import torch.distributed as dist

from wlb._errors import error
from wlb.torch.heartbeat import StoreGone, heartbeat
from wlb.torch.pipeline.micro_batch import PipelineMicroBatch

STEPS_APART: Final = 64  # further than one rank gets ahead of another; as many keys are in use

# By name of the group: what this rank agreed to in its last steps, the oldest first.
_agreed: defaultdict[str, deque[str]] = defaultdict(lambda: deque([""] * STEPS_APART, STEPS_APART))
_steps: defaultdict[str, int] = defaultdict(int)


def check_same(group: dist.ProcessGroup | None, micro_batches: Sequence[PipelineMicroBatch], how: str) -> None:
    """Raises where another rank of the pipeline came first with other micro-batches, or runs them otherwise.

    A longer activation than the one that is expected ends the process, a shorter one leaves a stale tail: neither may
    be sent. The first rank to come leaves what it runs in the store, and the others compare. Nobody waits for anybody.

    Args:
        group: The ranks of the pipeline.
        micro_batches: Of the step.
        how: By which schedule.

    Raises:
        wlb.WlbError: That names the rank that came first; on those that run something else. They fail, and so do the
            others, which communicate with them in vain.

    Complexity:
        One round trip to the store, if there is more than one rank.
    """
    heart = heartbeat() if dist.get_world_size(group) > 1 else None
    if heart is None:
        return
    group = group or dist.distributed_c10d._get_default_group()
    name = group.group_name
    tokens = [micro_batch.tokens for micro_batch in micro_batches]
    _steps[name] += 1
    digest = hashlib.blake2b(repr((tokens, how)).encode(), digest_size=16).hexdigest()
    text = f"{len(tokens)} of {sum(tokens)} tokens by {how}"
    mine = json.dumps([_steps[name], digest, heart.rank, text])
    key = f"wlb/micro_batches/{name}/{_steps[name] % STEPS_APART}"
    before = _agreed[name][0]
    try:
        # Left by whoever comes first, in place of what all agreed to long ago.
        found = heart.ask(lambda store: store.compare_set(key, before, mine)).decode()
    except StoreGone:  # what keeps it fails, and so will communication
        return
    _agreed[name].append(found)
    step, theirs, rank, what = json.loads(found)
    if (step, theirs) == (_steps[name], digest):
        return
    if step != _steps[name]:
        what = f"another step, {step} where this one is in {_steps[name]}"
    raise error("micro_batches", f"differ from those of rank {rank}: here {text}, there {what}", value=tokens)
