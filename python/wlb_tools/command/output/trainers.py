"""The trainers that `--trainer` names: which layouts they run, and the lines to paste that make wlb plan in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import wlb_tools
from wlb._core import MAX_DELAY
from wlb_tools.command.errors import CliError, setting
from wlb_tools.command.inputs.stream import Trainer
from wlb_tools.command.output.configuration import Verbatim, call
from wlb_tools.simulation import LoaderTuning


@dataclass(frozen=True)
class Entry:
    """How wlb enters a trainer.

    Attributes:
        before: what to paste before the call, such as imports.
        function: what is called, with what its result is assigned to; "": YAML has the arguments.
        first: its first arguments.
        after: what to paste after the call.
        pipeline: what to paste before the call where the model has pipeline stages; `{count}` stands for the
            micro-batches of a step on one data-parallel rank.
        data_parallel: whether wlb balances only data-parallel ranks there, so that no other axis may divide the model.
        dynamic: whether it runs Dynamic-CP.
        per_rank: whether it takes the tokens of a micro-batch on one context-parallel rank.
    """

    before: str
    function: str = ""
    first: tuple[str, ...] = ()
    after: str = ""
    pipeline: str = ""
    data_parallel: bool = True
    dynamic: bool = False
    per_rank: bool = False

    def check(self, name: Trainer, scenario: wlb_tools.Scenario) -> None:
        """Refuses a layout that the trainer does not run with wlb.

        Raises:
            CliError: it divides the model over ranks, where wlb balances only data-parallel ranks.
        """
        layout = scenario.layout
        divided = [axis for axis in ("tp", "cp", "pp") if getattr(layout, axis) > 1]
        if self.data_parallel and divided:
            said = " ".join(setting(axis, getattr(layout, axis)) for axis in divided)
            fix = " ".join([*(setting(axis, 1) for axis in divided), setting("dp", layout.world_size)])
            raise CliError(
                f"--trainer {name}: wlb balances only data-parallel ranks there, but the layout has {said}; give {fix}"
                " for FSDP or DDP on as many GPUs, or --trainer megatron, torchtitan or loop"
            )

    def written(self, tuning: LoaderTuning) -> str:
        """The lines to paste, with the arguments of the best plan."""
        values = self._values(tuning)
        if not self.function:
            return self.before + "".join(f"  {name}: {json.dumps(value)}\n" for name, value in values.items())
        made = call(self.function, *map(Verbatim, self.first), **values)
        layout = tuning.scenario.layout
        count = tuning.scenario.micro_batches * tuning.best.split / layout.dp
        staged = self.pipeline.format(count=int(count)) if layout.pp > 1 else ""
        return f"{self.before}\n\n{staged}{made}\n{self.after}"

    def _values(self, tuning: LoaderTuning) -> dict[str, Any]:
        best, scenario = tuning.best, tuning.scenario
        per_rank = -(-best.max_tokens // scenario.layout.cp)
        values: dict[str, Any] = {"max_tokens_per_rank": per_rank} if self.per_rank else {"max_tokens": best.max_tokens}
        values |= {"max_document_tokens": scenario.context, "tokens_per_batch": scenario.tokens_per_batch}
        if best.kind != "wlb":
            values["max_delay"] = 0
        elif tuning.max_delay != MAX_DELAY:
            values["max_delay"] = tuning.max_delay
        if best.dynamic and tuning.planner is not None:
            costs = Verbatim(f"wlb.CostModel.from_json({tuning.planner['cost_model'].to_json()!r})")
            prices = {name: value for name, value in tuning.planner.items() if name not in _OF_MODEL}
            values |= {"dynamic_cp": True, **prices, "cost_model": costs}
        elif scenario.meeting_ranks:
            values["sync"] = scenario.waiting
        return values


_OF_MODEL: Final = frozenset(("world_size", "num_stages", "num_virtual_stages", "schedule", "max_tokens_per_rank"))
"""Arguments of Dynamic-CP plans that a trainer takes from its model and ranks."""

_BALANCE: Final = "from wlb.integrations.huggingface import balance"
_MAKES_TRAINER: Final = "trainer = SFTTrainer(model, SFTConfig(packing=False, max_length=None), train_dataset=dataset)"

ENTRIES: Final[Mapping[Trainer, Entry]] = {
    "huggingface": Entry(_BALANCE, "trainer = balance", ("trainer",)),
    "trl": Entry(
        f"from trl import SFTConfig, SFTTrainer\n{_BALANCE}\n\n{_MAKES_TRAINER}", "trainer = balance", ("trainer",)
    ),
    "axolotl": Entry("plugins:\n  - wlb.integrations.axolotl.BalancePlugin\nwlb:\n"),
    "llamafactory": Entry(
        "from llamafactory.train.tuner import run_exp\nfrom wlb.integrations.llamafactory import balanced",
        "run_exp = balanced",
        ("run_exp",),
        after="run_exp()\n",
    ),
    "lightning": Entry(
        "from wlb.integrations.lightning import BalancedDataModule",
        "data = BalancedDataModule",
        ("documents", "config=model.config"),
    ),
    "megatron": Entry(
        "import wlb\nfrom wlb.integrations import megatron",
        "data = megatron.data_iterator",
        ('"corpus_text_document"', "model=model"),
        data_parallel=False,
        dynamic=True,
        per_rank=True,
    ),
    "torchtitan": Entry(
        "from wlb.integrations.torchtitan import balance",
        "config = balance",
        ("config",),
        pipeline="config.training.local_batch_size = {count} * config.parallelism.pipeline_parallel_microbatch_size\n"
        "config.training.global_batch_size = -1  # so that all of a step's micro-batches enter the pipeline at once\n",
        data_parallel=False,
    ),
}
"""The trainers whose loader makes the plan."""
