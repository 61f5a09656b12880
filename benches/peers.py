"""Planners that people use today, called as their trainers call them, from the package index.

A planner takes the lengths of one step's documents and a `Setting`, and gives a plan: for each data-parallel rank and
each round the lengths that it computes. A packer that only fills rows has its rows dealt to ranks in their order, as a
distributed sampler does.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heapify, heapreplace
from importlib.metadata import distribution, version
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np

import wlb
from benches.common import COST, Lengths

Part = int | tuple[int, int]  # a document's length; with the number of ranks that share it
Plan = list[list[list[Part]]]  # by rank, by round; padding included
AXOLOTL_BIN_SIZE, AXOLOTL_GROUP_SIZE = 200, 100_000  # its defaults


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a step is trained.

    Attributes:
        dp: data-parallel ranks.
        accumulation: micro-batches of a rank, for planners that are told.
        row: tokens of a row, for packers that fill rows: the longest document.
        max_tokens: most tokens of a micro-batch, for planners with such a limit.
    """

    dp: int
    accumulation: int
    row: int
    max_tokens: int

    @property
    def bins(self) -> int:
        """Micro-batches of the step."""
        return self.dp * self.accumulation


Planner = Callable[[Lengths, Setting], Plan]


def dealt(rows: Sequence[Sequence[int]], setting: Setting) -> Plan:
    """Rows in their order: the first round of all ranks, then the second. The last round may lack some."""
    return [[[*row] for row in rows[rank :: setting.dp]] for rank in range(setting.dp)]


# --- loading ---------------------------------------------------------------------------------------------------------


@contextmanager
def standing_in(names: Sequence[str]) -> Iterator[None]:
    """Modules that a file imports and that planning does not use."""
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: MagicMock(name=name, __path__=[]) for name in names})
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def one_file(package: str, module: str, stand_ins: Sequence[str] = ()) -> ModuleType:
    """One file of an installed distribution, without its package, which would import all that it depends on."""
    path = Path(str(distribution(package).locate_file(module.replace(".", "/") + ".py")))
    return loaded_file(path, f"{package} {version(package)} has no {module}", stand_ins)


def loaded_file(path: Path, missing: str, stand_ins: Sequence[str] = ()) -> ModuleType:
    """The module of a file, loaded once; `missing` is the error if there is none."""
    name = f"peer:{path}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not path.exists():
            raise ImportError(missing)
        with standing_in(stand_ins):
            loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(loaded)
            except BaseException:
                del sys.modules[name]
                raise
    return sys.modules[name]


# --- planners --------------------------------------------------------------------------------------------------------


def in_order(lengths: Lengths, setting: Setting) -> Plan:
    """Documents in order of arrival; one that no longer fits begins the next row."""
    rows: list[list[int]] = [[]]
    for length in lengths.tolist():
        if sum(rows[-1]) + length > setting.row:
            rows.append([])
        rows[-1].append(length)
    return dealt(rows, setting)


def heap(lengths: Lengths, setting: Setting) -> Plan:
    """What one writes first: costliest document first, each to the lightest micro-batch."""
    costs = COST.cost(lengths).tolist()
    lightest = [(0.0, index) for index in range(setting.bins)]
    heapify(lightest)
    bins: list[list[int]] = [[] for _ in range(setting.bins)]
    for document in sorted(range(len(costs)), key=lambda index: -costs[index]):
        cost, index = lightest[0]
        bins[index].append(int(lengths[document]))
        heapreplace(lightest, (cost + costs[document], index))
    return dealt(bins, setting)


def ours(sync: Any) -> Planner:
    """`wlb.pack` for ranks."""

    def plan(lengths: Lengths, setting: Setting) -> Plan:
        count, limit = setting.bins, setting.max_tokens
        packing = wlb.pack(
            lengths, num_micro_batches=count, max_tokens=limit, cost_model=COST, dp_size=setting.dp, sync=sync
        )
        return [[packing[index].lengths.tolist() for index in rank] for rank in packing.deal(setting.dp).tolist()]

    return plan


def shared(sync: Any) -> Planner:
    """`wlb.plan_dynamic_cp`: long documents have several ranks."""

    def plan(lengths: Lengths, setting: Setting) -> Plan:
        made = wlb.plan_dynamic_cp(
            lengths,
            world_size=setting.dp,
            num_stages=1,
            max_tokens_per_rank=setting.max_tokens,
            cost_model=COST,
            sync=sync,
        )
        found: Plan = [[[] for _ in made.micro_batches] for _ in range(setting.dp)]
        for number, micro_batch in enumerate(made.micro_batches):
            for group in micro_batch.groups:
                for rank in group.ranks:
                    found[rank][number] = [(length, len(group.ranks)) for length in group.lengths.tolist()]
        return found

    return plan


def transformers(lengths: Lengths, setting: Setting) -> Plan:
    """`Trainer(train_sampling_strategy=...)`: every micro-batch is padded to its longest sample."""
    sampler = importlib.import_module("transformers.trainer_pt_utils").BatchRebalanceSampler
    plan = sampler(lengths.tolist(), lengths.size, setting.dp, setting.accumulation, shuffle=False)
    micro_batches = plan._assign(list(range(lengths.size)), lengths.tolist())
    return [[[int(lengths[batch].max())] * len(batch) for batch in rank] for rank in micro_batches]


def trl(lengths: Lengths, setting: Setting) -> Plan:
    """`SFTConfig(packing=True)`: best fit decreasing."""
    import pyarrow
    from datasets import Dataset, disable_progress_bars
    from datasets.table import InMemoryTable

    disable_progress_bars()
    pack_dataset = importlib.import_module("trl.data_utils").pack_dataset
    tokens = pyarrow.array(np.zeros(int(lengths.sum()), dtype=np.int32))
    offsets = pyarrow.array(np.concatenate([[0], np.cumsum(lengths)]), type=pyarrow.int32())
    table = InMemoryTable(pyarrow.table({"input_ids": pyarrow.ListArray.from_arrays(offsets, tokens)}))
    # A fingerprint of our own: hashing all tokens takes longer than packing.
    options = {"keep_in_memory": True, "new_fingerprint": "packed", "batch_size": lengths.size}
    packed = pack_dataset(Dataset(table, fingerprint="documents"), setting.row, "bfd", options)
    return dealt(packed["seq_lengths"], setting)


def axolotl(lengths: Lengths, setting: Setting) -> Plan:
    """`sample_packing: true`: what its batch sampler calls."""
    stand_ins = ("axolotl", "axolotl.utils", "axolotl.utils.distributed", "axolotl.utils.logging")
    rows = one_file("axolotl", "axolotl.utils.samplers.multipack", stand_ins).pack_parallel(
        lengths.astype(np.int32),
        bin_capacity=setting.row,
        group_size=AXOLOTL_GROUP_SIZE,
        bin_size=AXOLOTL_BIN_SIZE,
        num_processes=1,
    )
    return dealt([lengths[row].tolist() for row in rows], setting)


def seqpacker(lengths: Lengths, setting: Setting) -> Plan:
    """Its default, best fit decreasing."""
    packed = importlib.import_module("seqpacker").pack_sequences(lengths.tolist(), setting.row)
    return dealt([list(pack.lengths) for pack in packed.packs], setting)


def verl(lengths: Lengths, setting: Setting) -> Plan:
    """`_balance_batch`, then `rearrange_micro_batches` of each rank, one more of each until none is over the limit."""
    stand_ins = ("verl", "verl.protocol", "verl.utils", "verl.utils.device", "verl.utils.tensordict_utils")
    module = one_file("verl", "verl.utils.seqlen_balancing", stand_ins)
    work = module.calculate_workload(lengths).tolist()
    shares = module.get_seqlen_balanced_partitions(work, setting.dp, equal_size=lengths.size % setting.dp == 0)
    count = max(-(-int(lengths[share].sum()) // setting.max_tokens) for share in shares)
    while True:
        plans: list[list[list[int]]] = []
        for share in shares:
            parts = module.get_seqlen_balanced_partitions([work[at] for at in share], count, equal_size=False)
            plans.append([[share[at] for at in part] for part in parts])
        if all(lengths[part].sum() <= setting.max_tokens for parts in plans for part in parts):
            break
        count += 1
    for parts in plans:
        parts.sort(key=lambda part: (sum(work[at] for at in part), part[0]), reverse=True)
    return [[lengths[part].tolist() for part in parts[::2][::-1] + parts[1::2]] for parts in plans]


def openrlhf(lengths: Lengths, setting: Setting) -> Plan:
    """`--use_dynamic_batch`: ranks get samples as they come, and split their own by tokens."""
    module = one_file("openrlhf", "openrlhf.utils.seqlen_balancing")
    shares = [lengths[rank :: setting.dp] for rank in range(setting.dp)]
    least = module.get_minimum_num_micro_batch_size
    count = max(least(share.tolist(), setting.max_tokens, 1, 1) for share in shares)
    split = module.get_seqlen_balanced_partitions
    return [[share[part].tolist() for part in split(share.tolist(), count, equal_size=False)] for share in shares]


def megatron(lengths: Lengths, setting: Setting) -> Plan:
    """`hybrid_context_parallel`: rounds are its groups, which end in a barrier; a rank computes its part of each."""
    module = importlib.import_module("megatron.core.pipeline_parallel.hybrid_cp_schedule")
    pool = MagicMock(**{"size.return_value": setting.dp})
    scheduler = module.BalancedCPScheduler(max_seq_len_per_rank=setting.max_tokens, dp_cp_group=pool)
    _, groups = scheduler.get_groups_and_subsamples(list(enumerate(lengths.tolist())), None)
    plan: Plan = [[] for _ in range(setting.dp)]
    for group in groups:
        members = np.bincount([sample for rank in group for sample in rank], minlength=lengths.size)
        for rank, samples in enumerate(group):
            plan[rank].append([(int(lengths[sample]), int(members[sample])) for sample in samples])
    return plan


@dataclass(frozen=True)
class Peer:
    """A planner of this page.

    Attributes:
        name: what it is called there.
        package: its distribution; "" for what is written here.
        plan: makes a plan.
    """

    name: str
    package: str
    plan: Planner


PEERS = [
    Peer("documents in order of arrival", "", in_order),
    Peer("longest first with a heap", "", heap),
    Peer("`BatchRebalanceSampler`", "transformers", transformers),
    Peer("`packing=True`", "trl", trl),
    Peer("`sample_packing`", "axolotl", axolotl),
    Peer("`pack_sequences`", "seqpacker", seqpacker),
    Peer("`rearrange_micro_batches`", "verl", verl),
    Peer("`--use_dynamic_batch`", "openrlhf", openrlhf),
    Peer("`BalancedCPScheduler`", "megatron-core", megatron),
    Peer('`pack(sync="step")`', "wlb", ours("step")),
    Peer('`pack(sync="micro_batch")`', "wlb", ours("micro_batch")),
    Peer('`plan_dynamic_cp(sync="step")`', "wlb", shared("step")),
    Peer('`plan_dynamic_cp(sync="micro_batch")`', "wlb", shared("micro_batch")),
]
