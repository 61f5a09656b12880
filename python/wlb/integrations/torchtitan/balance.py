"""The way in: a configuration of torchtitan becomes one that trains wlb's plans."""

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

    A step trains as many tokens as before, `training.global_batch_size * training.seq_len`, so that the learning rate
    stays right; how many micro-batches these are follows from `max_tokens`, and gradient accumulation from that.
    `training.seq_len` is the context from now on: the longest document that is trained uncut.

    Under context parallelism every micro-batch is sharded by `wlb.shard`, document by document: FlexAttention
    through a load balancer of torch's, varlen attention, which torchtitan does not shard, as
    `DocumentAttention`. Pipeline stages are told the lengths of every step. Rows are filled up to what kernels
    and ranks demand, no further: a multiple of `cp * 128` tokens for FlexAttention, of `cp * tp` otherwise, and of the
    chunks of the loss.

    Checkpoints hold the documents that wait, after the last step that was trained; another number of ranks may load
    them. torchtitan's loggers also get `wlb/imbalance`, `wlb/lost_time`, `wlb/delay_mean`, `wlb/backlog_tokens`, ...

    Args:
        config: torchtitan's, as its registry makes it; it stays as it is.
        max_tokens: most tokens of a micro-batch: what the memory of a rank holds.
        **options: of `WlbDataLoader.Config`: `documents`, `streams` or `dataset` (by default the data set of
            `config.dataloader`), `max_document_tokens`, `oversize`, `max_delay`, `tokens_per_batch`, `token_buckets`,
            `num_epochs`, `lengths`, `cost_model`, `verify`, ...

    Returns:
        A configuration of the same kind: `config.build().train()`, or `torchtitan.train`'s `--config`. What is changed
        in it afterwards, from the command line for one, is taken and checked when the trainer is built.

    Raises:
        wlb.WlbError: what is against it, by name: a model in which documents see each other, CUDA graphs over unequal
            lengths, a data loader that packs by itself, a validator in pipeline stages, ...
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
    """A trainer that takes plans, of the class that the configuration is for."""

    @dataclass(kw_only=True, slots=True)
    class Config(owner.Config):  # type: ignore[misc]
        """Configuration of a pipeline schedule that takes plans."""

    names = {"Config": Config, "__doc__": owner.__doc__, "__module__": owner.__module__}
    return type(owner.__name__, (BalancedTrainer, owner), names)
