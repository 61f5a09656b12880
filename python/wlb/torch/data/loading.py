"""What a loader of documents with known lengths is told, declared once for all that make one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from numpy.typing import ArrayLike

import wlb
from wlb._choices import Oversize
from wlb._core import MAX_DELAY
from wlb._errors import check_bool, check_integer, check_options, error
from wlb.torch.data.sampler import BalancedBatchSampler

FOREVER: Final = 2**31 - 1
"""Epochs of a run that a trainer ends by its steps."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Loading:
    """How documents become steps: arguments of `balanced_loader`, and of loaders inside of trainers.

    Attributes:
        max_document_tokens: the context; by default what a micro-batch holds.
        oversize: "split" longer documents, each token predicting the next one all the same; "truncate" them; or it is
            an "error".
        max_delay: most steps that a document waits for others; 0: none waits.
        cost_model: what documents cost, where the model's configuration does not say it.
        lengths: int[documents] tokens, if they are known; else they are read, once.
        num_epochs: of the run: after the last one what waits is drained.
        shuffle: another order in every epoch.
        seed: of these orders.
        num_workers: processes that read.

    Raises:
        wlb.WlbError: a number makes no sense.
    """

    max_document_tokens: int | None = None
    oversize: Oversize = "split"
    max_delay: int = MAX_DELAY
    cost_model: wlb.CostModel | None = None
    lengths: ArrayLike | None = None
    num_epochs: int = 1
    shuffle: bool = True
    seed: int = 0
    num_workers: int = 0

    def __post_init__(self) -> None:
        check_integer("max_delay", self.max_delay, minimum=0)
        check_integer("num_workers", self.num_workers, minimum=0)
        check_bool("shuffle", self.shuffle)

    @classmethod
    def of(
        cls, options: Mapping[str, Any], *functions: Callable[..., Any], but: Collection[str] = ()
    ) -> tuple[Loading, dict[str, Any]]:
        """The arguments among these options, and the others.

        Args:
            options: by name.
            *functions: whose options the others are.
            but: names of theirs that are set by the caller.

        Raises:
            wlb.WlbError: one is of none of them; or as the class.
        """
        check_options(options, cls, *functions, but=but)
        own = {field.name for field in fields(cls)}
        mine = {name: value for name, value in options.items() if name in own}
        return cls(**mine), {name: value for name, value in options.items() if name not in own}

    def costs(self, config: Any) -> wlb.CostModel:
        """What documents cost, by a Hugging Face model's configuration (or the mapping that it is) if not given.

        Raises:
            wlb.WlbError: both are given, or none.
        """
        if (config is None) == (self.cost_model is None):
            raise error("cost_model", "or config: give one of them, which says what documents cost")
        if self.cost_model is not None:
            return self.cost_model
        mapping = config if isinstance(config, Mapping) else config.to_dict()
        return wlb.ModelConfig.from_hugging_face(mapping).cost_model()

    def packer(self, num_micro_batches: int, **others: Any) -> wlb.Packer:
        """For steps of so many micro-batches; `others` are what else `wlb.Packer` takes, and come first.

        Among them the `tokens_per_batch` that are read for a step, if they are no context for each micro-batch.
        """
        arguments: dict[str, Any] = {"max_document_tokens": self.max_document_tokens, "oversize": self.oversize}
        if self.max_delay:
            arguments |= {"release": "adaptive", "max_delay": self.max_delay}
        elif {"release", "outlier_thresholds"} & others.keys():
            arguments["max_delay"] = 0  # a rule by which documents wait has a limit of its own
        else:
            arguments["release"] = "fifo"  # no document waits
        return wlb.Packer(num_micro_batches=num_micro_batches, **arguments | others)

    def sampler(self, lengths: ArrayLike, packer: wlb.Packer, *, rank: int, ranks: int) -> BalancedBatchSampler:
        """That of one data-parallel rank."""
        return BalancedBatchSampler(
            lengths,
            packer=packer,
            dp_rank=rank,
            dp_size=ranks,
            shuffle=self.shuffle,
            seed=self.seed,
            num_epochs=self.num_epochs,
        )
