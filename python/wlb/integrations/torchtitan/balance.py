"""Changes a configuration of torchtitan into one that trains wlb's plans."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader

from wlb._errors import error
from wlb.integrations.torchtitan.loader import WlbDataLoader
from wlb.integrations.torchtitan.refusals import check_config, check_dataloader
from wlb.integrations.torchtitan.trainer import BalancedTrainer


def balance(config: Any, *, max_tokens: int, **options: Any) -> Any:
    """Makes a torchtitan configuration train on micro-batches of equal work.

    A step trains as many tokens as before, `training.global_batch_size * training.seq_len`, so the learning rate stays
    right. The number of micro-batches, and so gradient accumulation, follows from `max_tokens`. `training.seq_len` is
    now the length of the longest document that is not cut.

    With context parallelism every micro-batch is sharded by `wlb.shard`, document by document: for FlexAttention by
    torch's load balancers, for varlen attention, which torchtitan does not shard, by `DocumentAttention`. Pipeline
    stages get the lengths of every step. Rows are padded only as far as kernels and ranks demand: to a multiple of `cp
    * 128` tokens for FlexAttention, of `cp * tp` otherwise, and of the number of chunks of the loss.

    Checkpoints hold the documents that wait after the last trained step; another number of ranks may load them.
    torchtitan's loggers also get `wlb/imbalance`, `wlb/lost_time`, `wlb/delay_mean`, `wlb/backlog_tokens`, ...

    Args:
        config: torchtitan's, as its registry makes it; it is not changed.
        max_tokens: most tokens of a micro-batch, limited by the memory of a rank.
        **options: of `WlbDataLoader.Config`: `documents`, `streams` or `dataset` (by default the data set of
            `config.dataloader`), `max_document_tokens`, `oversize`, `max_delay`, `tokens_per_batch`, `token_buckets`,
            `num_epochs`, `lengths`, `cost_model`, `verify`, ...

    Returns:
        A configuration of the same kind, for `config.build().train()` or `torchtitan.train`'s `--config`. You may still
        change it, for example from the command line; it is checked when the trainer is built.

    Raises:
        wlb.WlbError: the configuration contradicts a plan: a model in which documents see each other, CUDA graphs over
            unequal lengths, a data loader that packs by itself, a validator in pipeline stages, ...
    """
    own = getattr(config, "dataloader", None)
    if isinstance(own, WlbDataLoader.Config) and issubclass(type(config)._owner, BalancedTrainer):
        raise error("config", "is balanced already")
    if isinstance(own, BaseDataLoader.Config) and not {"documents", "streams", "dataset"} & options.keys():
        check_dataloader(own)
        options |= {"dataset": own.dataset, "dataset_path": own.dataset_path}
    known = {part.name for part in fields(WlbDataLoader.Config)}
    if unknown := sorted(options.keys() - known):
        raise error(unknown[0], f"is no option of WlbDataLoader: {', '.join(sorted(known))}")
    loader = WlbDataLoader.Config(max_tokens=max_tokens, **options)
    values = {part.name: getattr(config, part.name) for part in fields(config) if part.init} | {"dataloader": loader}
    check_config(replace(config, dataloader=loader) if isinstance(own, BaseDataLoader.Config) else config)
    balanced: Any = _balanced(type(config)._owner)
    return balanced.Config(**values)


@cache
def _balanced(owner: Any) -> Any:
    """A trainer that takes plans, derived from the class for which the configuration is."""

    @dataclass(kw_only=True, slots=True)
    class Config(owner.Config):  # type: ignore[misc]
        """Configuration of a pipeline schedule that takes plans."""

    names = {"Config": Config, "__doc__": owner.__doc__, "__module__": owner.__module__}
    return type(owner.__name__, (BalancedTrainer, owner), names)
