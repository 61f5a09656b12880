"""Trains a small Llama on real documents, on any number of data, pipeline, context and tensor parallel ranks.

    pip install ".[examples]"    # in a checkout
    torchrun --nproc-per-node 4 -m studies.trainer.train --pp 2 --cp 2 --steps 20 --checkpoint-dir run
    python -m studies.trainer.train --steps 20                       # the same on one process, with the same losses

Killed? The same command again goes on from the newest sound checkpoint, on the same documents. The layout may change:
dp is what `--pp`, `--cp` and `--tp` leave of the world. `wlb audit run` proves that every document was trained once.

Read from `train` downwards. Everything that wlb does is in the few lines that mention it: a packer plans every global
batch, a sampler hands each data-parallel rank its micro-batches, `collate` keeps what this context-parallel rank
computes, attention takes the shard, and the pipeline takes micro-batches of unequal length.

With `--plan dynamic_cp` the dp x cp ranks have no fixed roles: a plan gives every document of a global batch the group
of ranks that it needs.

    torchrun --nproc-per-node 4 -m studies.trainer.train --cp 2 --ep 2 --experts 8 --experts-per-token 2 --ffn 88

trains a mixture of experts, which neighbours among the dp x cp ranks divide among them (`experts.py`).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cyclopts import App, Parameter
from cyclopts.types import NonNegativeInt, PositiveInt
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.data import DataLoader

import wlb
from studies.trainer import checkpoints
from studies.trainer.baselines import BaselineLoader
from studies.trainer.corpus import read_corpus
from studies.trainer.experts import ExpertLoad, Load
from studies.trainer.llama import AttentionOptions, LlamaConfig, LlamaStage, parallelize
from wlb.torch.agreement import check_agreement
from wlb.torch.attention import cp_sizes, prepare_attention
from wlb.torch.data import (
    BalancedBatchSampler,
    Documents,
    DynamicCpLoader,
    DynamicCpStep,
    Ledger,
    PackedBatch,
    Step,
    StepLoader,
    collate,
)
from wlb.torch.flops import model_flops, model_flops_utilization, peak_flops
from wlb.torch.groups import ContextParallelGroups, build_mesh, data_and_context, expert_ranks
from wlb.torch.loss import count_valid_tokens, token_normalized_loss
from wlb.torch.pipeline import (
    PipelineMicroBatch,
    VarlenPipelineStage,
    pipeline_step,
    stages_of_rank,
)
from wlb.torch.timing import CostTracker, StepTimer

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
Transport = Literal["all_gather", "fetch", "ring", "ulysses", "usp"]
Method = Literal["wlb", "refined", "original", "whole", "fixed"]
Release = Literal["fifo", "adaptive"]
BASELINES = {"original": "original", "whole": "whole", "fixed": "fixed_length"}
Plan = Literal["static", "dynamic_cp"]
GroupSizes = Literal["powers_of_two", "any"]
Strategy = Literal["auto", "per_document", "per_sequence", "hybrid"]
Sync = Literal["step", "micro_batch"]
Dtype = Literal["float32", "bfloat16"]

AnyStep = Step[PackedBatch] | DynamicCpStep[PackedBatch]
AnyPlan = wlb.Packing | wlb.DynamicCpPlan
GroupOf = Callable[[PackedBatch], dist.ProcessGroup | None]


@dataclass(frozen=True)
class Shape(LlamaConfig):
    """The model as options; its vocabulary is that of the documents."""

    vocab_size: Annotated[int, Parameter(parse=False)] = 257
    tie_word_embeddings: Annotated[bool, Parameter(parse=False)] = False


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run is; the fields are the options of the command.

    Args:
        pp: pipeline ranks.
        cp: context-parallel ranks.
        tp: tensor-parallel ranks; data-parallel ranks are what remains of the world.
        ep: of the dp x cp ranks, neighbours that divide the experts among them.
        virtual_stages: pipeline stages on each rank.
        schedule: of the pipeline.
        transport: how context-parallel ranks exchange keys and values.
        ulysses_size: ranks that exchange heads, with usp.
        corpus: folder of documents; default: Python's own library.
        pattern: names of files that are documents.
        tokenizer: a tokenizer.json; default: bytes.
        method: how to pack; refined is wlb with exchanges where memory is scarce; the others are for comparison.
        plan: dynamic_cp: each document on as many of the dp x cp ranks as it needs.
        cp_exchange: with it: what one more rank in a group costs, in tokens.
        group_sizes: with it: groups of any number of ranks, or of powers of two.
        ranks_per_node: with it: ranks of a stage on each node, inside which an exchange costs nothing.
        window: global batches that --method fixed packs together.
        context: context window, tokens; longer documents are split.
        micro_batches: micro-batches of a global batch, over all ranks.
        memory_factor: most tokens of a micro-batch, over the context.
        max_documents: most documents of a micro-batch; with dynamic_cp, of a group.
        multiple_of_tokens: each context-parallel rank's part of a micro-batch runs padded to a multiple of it.
        token_bucket: or to one of these sizes only, ascending; one option for each.
        finer: so many times as many micro-batches of the same global batch, where documents stay whole.
        release: which documents wait: in queues by thresholds (fifo), or for as long as it pays (adaptive).
        delay_price: with adaptive: what an iteration of delay has to save of a step.
        max_mean_delay: or the mean delay for which the price is found on the corpus.
        queues: outlier queues, their thresholds tuned on the corpus.
        threshold: or the threshold of a queue; one option for each.
        max_delay: most iterations a document waits.
        max_step_cost: with adaptive: most work of a step, in mean global batches.
        max_early: with adaptive: global batches by which long documents may come before their turn.
        sync: plan for the data-parallel ranks, which wait for each other once a step, or in every micro-batch.
        strategy: how context-parallel ranks share documents.
        hybrid_threshold: shorter documents stay on one rank, with hybrid.
        workers: data-loader workers.
        learn_costs: steps between two looks at what micro-batches take; 0: costs stay as assumed.
        model: its shape.
        dtype: of computation; parameters stay float32.
        activation_checkpointing: recompute activations in the backward pass.
        steps: global batches.
        learning_rate: highest learning rate.
        expert_bias_rate: how far a step moves the biases that level the visits to experts; 0: not.
        warmup: steps of warm-up.
        clip: largest gradient norm.
        seed: of weights and of the order of documents.
        checkpoint_dir: where checkpoints go, and a run resumes from.
        checkpoint_every: steps between checkpoints.
        keep: newest checkpoints that are kept; older ones are removed.
        metrics_file: a .jsonl that gets a line a step.
    """

    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: PositiveInt = 1
    virtual_stages: int = 1
    schedule: Schedule = "1f1b"
    transport: Transport = "all_gather"
    ulysses_size: int | None = None
    corpus: Path | None = None
    pattern: str = "*.py"
    tokenizer: Path | None = None
    method: Method = "wlb"
    plan: Plan = "static"
    cp_exchange: float = 16.0
    group_sizes: GroupSizes = "powers_of_two"
    ranks_per_node: int | None = None
    window: int = 1
    context: int = 2048
    micro_batches: int = 8
    memory_factor: float = 1.5
    max_documents: int | None = None
    multiple_of_tokens: int = 1
    token_bucket: tuple[int, ...] = ()
    finer: PositiveInt = 1
    release: Release = "fifo"
    delay_price: float | None = None
    max_mean_delay: float | None = None
    queues: int = 2
    threshold: tuple[int, ...] = ()
    max_delay: int | None = None
    max_step_cost: float | None = None
    max_early: NonNegativeInt = 0
    sync: Sync | None = None
    strategy: Strategy = "per_document"
    hybrid_threshold: int | None = None
    workers: int = 1
    learn_costs: NonNegativeInt = 0
    model: Annotated[Shape, Parameter(name="*")] = Shape()
    dtype: Dtype = "float32"
    activation_checkpointing: bool = False
    steps: int = 20
    learning_rate: float = 3e-3
    expert_bias_rate: float = 1e-3
    warmup: int = 10
    clip: float = 1.0
    seed: int = 0
    checkpoint_dir: Path | None = None
    checkpoint_every: PositiveInt = 10
    keep: PositiveInt = 3
    metrics_file: Path | None = None


def train(settings: Settings) -> None:
    """One rank's whole run."""
    device, mesh = set_up_ranks(settings)
    run(settings, device, mesh)


def run(settings: Settings, device: torch.device, mesh: DeviceMesh) -> None:
    """Builds everything, resumes, and goes on to the last step."""
    dataset = read_corpus(settings.corpus, pattern=settings.pattern, tokenizer_file=settings.tokenizer)
    config = LlamaConfig(**{**vars(settings.model), "vocab_size": dataset.vocab_size})
    loader = build_loader(settings, dataset, config, mesh, device)
    stages, optimizers = build_model(settings, config, mesh, device)
    group_of = context_groups(settings, mesh)

    done = resume(settings, stages, optimizers, loader)
    ledger = build_ledger(settings, loader, mesh)
    tracker = build_tracker(settings, loader, stages, mesh, device)
    experts = build_expert_load(settings, config, stages, mesh)
    schedule = partial(learning_rate, settings)
    report = Report(settings, config, is_main=dist.get_rank() == 0)
    waiting = time.perf_counter()
    while done < settings.steps:
        for step in loader:
            arrived = time.perf_counter()
            check_agreement(step)
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = schedule(done)
            learnt = train_step(settings, step, stages, optimizers, group_of, mesh, device)
            load = None
            if experts is not None and learnt is not None:
                load = experts.step(len(step.micro_batches), device)
                experts.level(load, settings.expert_bias_rate)
            done += 1
            if ledger is not None:
                ledger.record(step)
            if tracker is not None and (update := tracker.step(step)) is not None and report.is_main:
                print(update.report(), flush=True)
            now = time.perf_counter()
            report.step(done, step, learnt, load, stall=arrived - waiting, seconds=now - waiting, loader=loader)
            if settings.checkpoint_dir and (done % settings.checkpoint_every == 0 or done == settings.steps):
                state = state_of(done, stages, optimizers, state_after(step, loader))
                checkpoints.save(settings.checkpoint_dir, done, state, keep=settings.keep)
            if done == settings.steps:
                break
            waiting = time.perf_counter()
    if isinstance(loader, DynamicCpLoader):
        loader.close()


def train_step(
    settings: Settings,
    step: AnyStep,
    stages: list[VarlenPipelineStage],
    optimizers: list[torch.optim.Optimizer],
    group_of: GroupOf,
    mesh: DeviceMesh,
    device: torch.device,
) -> tuple[float, float] | None:
    """Forward, backward and update on one global batch; gives its mean loss over tokens and the gradient norm.

    None where no token has a label: an update with gradients of zero would still decay weights and move by momentum.
    """
    batches = [batch.to(device, non_blocking=True) for batch in step.micro_batches]
    if isinstance(step, DynamicCpStep):
        valid = step.num_valid_tokens
    else:
        valid = count_valid_tokens(step, group=data_and_context(mesh).get_group())
    if valid == 0:  # on all ranks, so that none of them waits for another
        return None
    losses = pipeline_step(
        stages,
        [for_pipeline(batch, group_of(batch)) for batch in batches],
        schedule=settings.schedule,
        loss_fn=partial(token_normalized_loss, num_valid_tokens=valid),
    )
    norm = clip_gradients(stages, settings.clip, mesh)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    # Each rank of the last stage has its share of the mean, and all of its tensor-parallel ranks the same one.
    loss = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=device)
    for group in (data_and_context(mesh).get_group(), mesh["pp"].get_group()):
        dist.all_reduce(loss, group=group)
    return loss.item(), norm


def for_pipeline(batch: PackedBatch, group: dist.ProcessGroup | None = None) -> PipelineMicroBatch:
    """Tokens for the first stage, labels for the last one, positions, the shard and its ranks for all."""
    return PipelineMicroBatch(
        tokens=batch.tokens.numel(),
        args=(batch.tokens,),
        kwargs={"position_ids": batch.position_ids, "shard": batch.shard, "group": group},
        target=batch.labels,
    )


def clip_gradients(stages: list[VarlenPipelineStage], limit: float, mesh: DeviceMesh) -> float:
    """Scales all gradients so that their norm, over all stages and shards, is at most `limit`; gives the norm."""
    groups = by_mesh(parameter for stage in stages for parameter in stage.submod.parameters())
    squared = torch.zeros((), device=groups[0][0].device)
    for parameters in groups:
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            for dim in range(norm.device_mesh.ndim):  # one at a time: torch warns when it has to do both at once
                norm = norm.redistribute(placements=[*[Replicate()] * (dim + 1), *norm.placements[dim + 1 :]])
            norm = norm.to_local()
        squared = squared + norm**2
    dist.all_reduce(squared, group=mesh["pp"].get_group())
    total = squared.sqrt()
    for parameters in groups:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, total)
    return total.item()


def by_mesh(parameters: Iterable[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Parameters in groups that lie on the same ranks: torch computes with no others at once. Experts are apart."""
    groups: dict[DeviceMesh | None, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return list(groups.values())


def learning_rate(settings: Settings, done: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    if done < settings.warmup:
        return settings.learning_rate * (done + 1) / settings.warmup
    progress = (done - settings.warmup) / max(settings.steps - settings.warmup, 1)
    return settings.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


# --- what a run is built of ------------------------------------------------------------------------------------------


def set_up_ranks(settings: Settings) -> tuple[torch.device, DeviceMesh]:
    """Joins the ranks that torchrun started; alone, makes a world of one."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if not dist.is_initialized():
        dist.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")
    others = settings.pp * settings.cp * settings.tp
    dp = max(dist.get_world_size() // others, 1)
    return device, build_mesh(pp=settings.pp, dp=dp, cp=settings.cp, tp=settings.tp, device_type=device.type)


def context_groups(settings: Settings, mesh: DeviceMesh) -> GroupOf:
    """Which ranks share a micro-batch: those of the mesh, or those that its plan chose."""
    if settings.plan == "dynamic_cp":
        return ContextParallelGroups(mesh).of
    group = mesh["cp"].get_group() if settings.cp > 1 else None
    return lambda batch: group


def build_loader(settings: Settings, dataset: Any, config: LlamaConfig, mesh: DeviceMesh, device: torch.device) -> Any:
    """Packs global batches of `micro_batches` context windows into micro-batches of equal work; or as others do."""
    dynamic = settings.plan == "dynamic_cp"
    if dynamic and (settings.method in BASELINES or settings.strategy != "per_document"):
        raise SystemExit("--plan dynamic_cp goes with --method wlb or refined, and --strategy per_document")
    of_adaptive = (settings.delay_price, settings.max_mean_delay, settings.max_step_cost, settings.max_early or None)
    if settings.release == "fifo" and of_adaptive != (None, None, None, None):
        raise SystemExit("--delay-price, --max-mean-delay, --max-step-cost and --max-early go with --release adaptive")
    if settings.method in BASELINES and (settings.release, settings.finer, settings.sync) != ("fifo", 1, None):
        raise SystemExit("--release adaptive, --finer and --sync go with --method wlb or refined")
    if dynamic and settings.sync is not None:
        raise SystemExit("--sync goes with --plan static: a dynamic plan has no data-parallel ranks to plan for")
    if not dynamic and (settings.group_sizes, settings.ranks_per_node) != ("powers_of_two", None):
        raise SystemExit("--group-sizes and --ranks-per-node go with --plan dynamic_cp")
    # The same for all who plan micro-batches and who fill them up.
    sizes: dict[str, Any] = {
        "max_documents": settings.max_documents,
        "multiple_of_tokens": settings.multiple_of_tokens,
        "token_buckets": settings.token_bucket,
    }
    if settings.method in BASELINES and tuple(sizes.values()) != (None, 1, ()):
        raise SystemExit("--max-documents, --multiple-of-tokens and --token-bucket go with --method wlb or refined")
    cost = wlb.CostModel.from_flops(**config.shape(), attention_efficiency=0.55)
    keep = partial(
        collate,
        cp_rank=mesh["cp"].get_local_rank(),
        cp_size=mesh["cp"].size(),
        strategy=settings.strategy,
        hybrid_threshold=settings.hybrid_threshold,
        **sizes,
    )
    # With a dynamic plan this is only who reads a document.
    readers = data_and_context(mesh) if dynamic else mesh["dp"]
    ranks = {"dp_rank": readers.get_local_rank(), "dp_size": readers.size()}
    if settings.method in BASELINES:
        return BaselineLoader(
            dataset,
            collate=keep,
            method=BASELINES[settings.method],
            window=settings.window,
            num_micro_batches=settings.micro_batches,
            context=settings.context,
            cost_model=cost,
            seed=settings.seed,
            **ranks,
        )
    limits: dict[str, Any] = {
        "num_micro_batches": settings.micro_batches * settings.finer,
        "max_tokens": int(settings.context * settings.memory_factor),
        "cost_model": cost,
        "max_document_tokens": settings.context,
        "max_delay": settings.max_delay,
        "tokens_per_batch": settings.micro_batches * settings.context,
        "method": "refined" if settings.method == "refined" else "var_length",
    }
    if settings.sync is not None:
        limits |= {"dp_size": readers.size(), "sync": settings.sync}
    if not dynamic:
        limits |= {**sizes, "cp_size": mesh["cp"].size()}
    waiting = what_waits(settings, dataset, limits)
    sampler = BalancedBatchSampler(
        dataset.lengths,
        packer=wlb.Packer(oversize="split", **waiting, **limits),
        seed=settings.seed,
        num_epochs=1_000_000,  # the number of steps ends the run
        max_early=settings.max_early,
        **ranks,
    )
    documents = DataLoader(
        Documents(dataset),
        batch_sampler=sampler,
        collate_fn=list if dynamic else keep,
        num_workers=settings.workers,
        pin_memory=torch.cuda.is_available() and not dynamic,
    )
    if not dynamic:
        return StepLoader(documents, prepare=partial(prepare, settings, device))
    plan = partial(
        wlb.plan_dynamic_cp,
        world_size=readers.size(),
        num_stages=settings.pp,
        num_virtual_stages=settings.virtual_stages,
        max_tokens_per_rank=math.ceil(settings.context * settings.memory_factor / settings.cp),
        # What the schedules of torch take at least.
        min_micro_batches=settings.pp * (2 if settings.schedule == "dualpipev" else 1),
        cost_model=cost,
        exchange=wlb.Exchange(seconds_per_exchange=settings.cp_exchange * float(cost.cost([1])[0])),
        group_sizes=group_sizes(settings, config.num_heads, config.num_kv_heads),
        ranks_per_node=settings.ranks_per_node,
        **sizes,
    )
    return DynamicCpLoader(
        StepLoader(documents), plan=plan, group=readers.get_group(), prepare=partial(prepare, settings, device)
    )


def group_sizes(settings: Settings, num_heads: int, num_kv_heads: int) -> GroupSizes | Sequence[int]:
    """The groups of a Dynamic-CP plan: as the settings say, of those that attention can run."""
    heads = {"num_heads": num_heads // settings.tp, "num_kv_heads": num_kv_heads // settings.tp}
    able = cp_sizes(settings.transport, **heads)
    if able == "any":
        return settings.group_sizes
    return [size for size in able if settings.group_sizes == "any" or size & (size - 1) == 0]


def what_waits(settings: Settings, dataset: Any, limits: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the packer that say which documents it holds: as they were given, or tuned on the corpus."""
    pieces = wlb.split_documents(dataset.lengths, max_document_tokens=settings.context)[2]
    tuned = {**limits, "max_tokens": wlb.Packer(**limits).max_tokens}  # the largest size within it
    shape = ("multiple_of_tokens", "cp_size", "token_buckets")
    tuned = {name: value for name, value in tuned.items() if name not in shape}
    if settings.release == "adaptive":
        price = settings.delay_price
        if settings.max_mean_delay is not None:
            if price is not None:
                raise SystemExit("--delay-price or --max-mean-delay: give one of them")
            tuned |= {"max_mean_delay": settings.max_mean_delay, "max_step_cost": settings.max_step_cost}
            tuned |= {"max_early": settings.max_early}
            price = wlb.tune(pieces, **tuned).delay_price
        return {"release": "adaptive", "delay_price": price, "max_step_cost": settings.max_step_cost}
    thresholds = settings.threshold
    if settings.queues and not thresholds:
        thresholds = wlb.tune(pieces, num_queues=settings.queues, **tuned).thresholds
    return {"outlier_thresholds": thresholds}


def prepare(settings: Settings, device: torch.device, batch: PackedBatch) -> PackedBatch:
    """Beside the step before: what attention has to know of a micro-batch, so that no layer waits for it."""
    if batch.cp_size > 1:
        options = AttentionOptions(settings.transport, settings.ulysses_size).of(batch.shard)
        prepare_attention(batch.shard, rank=batch.cp_rank, device=device, **options)
    return batch


def build_model(
    settings: Settings, config: LlamaConfig, mesh: DeviceMesh, device: torch.device
) -> tuple[list[VarlenPipelineStage], list[torch.optim.Optimizer]]:
    """This rank's stages, with an optimizer each."""
    pipeline, dtype = mesh["pp"], getattr(torch, settings.dtype)
    num_stages = pipeline.size() * settings.virtual_stages
    if num_stages > config.num_layers:
        raise SystemExit(f"{config.num_layers} layers are too few for {num_stages} pipeline stages")
    experts = divide_experts(settings, config, mesh)
    mine = stages_of_rank(
        pipeline.get_local_rank(), pp_size=pipeline.size(), num_stages=num_stages, schedule=settings.schedule
    )
    stages = []
    for index in mine:
        module = LlamaStage(
            config,
            stage=index,
            num_stages=num_stages,
            options=AttentionOptions(settings.transport, settings.ulysses_size),
            checkpoint_activations=settings.activation_checkpointing,
        )
        module.initialize(settings.seed)
        module = parallelize(module.to(device), mesh, dtype=dtype, experts=experts)
        stages.append(
            VarlenPipelineStage(
                module,
                index,
                num_stages,
                device,
                group=pipeline.get_group(),
                hidden_size=config.hidden_size,
                dtype=dtype,
            )
        )
    groups = [[{"params": group} for group in by_mesh(stage.submod.parameters())] for stage in stages]
    return stages, [torch.optim.AdamW(group, lr=settings.learning_rate) for group in groups]


def divide_experts(settings: Settings, config: LlamaConfig, mesh: DeviceMesh) -> DeviceMesh | None:
    """The ranks that divide experts, and those that hold the same; None where each rank has all of them."""
    if config.experts_per_token < 1 or config.shared_ffn_hidden_size < 0:
        raise SystemExit("--experts-per-token must be at least 1, --shared-ffn at least 0")
    if not settings.expert_bias_rate >= 0:
        raise SystemExit(f"--expert-bias-rate {settings.expert_bias_rate}: must be at least 0")
    if config.experts_per_token > config.num_experts:
        raise SystemExit(f"--experts-per-token {config.experts_per_token}: there are {config.num_experts} experts")
    if config.shared_ffn_hidden_size and config.num_experts == 1:
        raise SystemExit("--shared-ffn goes with --experts above 1")
    if config.num_experts > 1 and (settings.multiple_of_tokens, settings.token_bucket) != (1, ()):
        raise SystemExit("--multiple-of-tokens and --token-bucket do not go with --experts: padding would visit them")
    if config.num_experts > 1 and settings.tp > 1:
        raise SystemExit(f"--tp {settings.tp} does not go with --experts: use --ep, which divides whole experts")
    if settings.ep == 1:
        return None
    if config.num_experts % settings.ep:
        raise SystemExit(f"--ep {settings.ep} does not divide {config.num_experts} experts")
    ranks = expert_ranks(mesh, ep=settings.ep)
    if config.ffn_hidden_size % ranks["edp"].size() or config.hidden_size % ranks["edp"].size():
        raise SystemExit(
            f"--hidden {config.hidden_size} and --ffn {config.ffn_hidden_size} must divide by {ranks['edp'].size()}, "
            f"the ranks that hold the same experts (dp x cp / --ep {settings.ep})"
        )
    return ranks


def build_expert_load(
    settings: Settings, config: LlamaConfig, stages: list[VarlenPipelineStage], mesh: DeviceMesh
) -> ExpertLoad | None:
    """Counts which experts tokens visit, and where; None without experts."""
    if config.num_experts == 1:
        return None
    return ExpertLoad(
        (stage.submod for stage in stages),
        num_layers=config.num_layers,
        ranks=data_and_context(mesh),
        pipeline=mesh["pp"],
        ep=settings.ep,
    )


def build_ledger(settings: Settings, loader: Any, mesh: DeviceMesh) -> Ledger | None:
    """Beside the checkpoints, a line for each step, so that `wlb audit` can prove what the run trained.

    Of the ranks that train the same documents one writes: the first of its pipeline and of its tensor and, where the
    plan does not choose them, context-parallel ranks.
    """
    readers = data_and_context(mesh) if settings.plan == "dynamic_cp" else mesh["dp"]
    alike = ["pp", "tp"] if settings.plan == "dynamic_cp" else ["pp", "tp", "cp"]
    if settings.checkpoint_dir is None or settings.method in BASELINES:
        return None
    if any(mesh[name].get_local_rank() > 0 for name in alike):
        return None
    folder = settings.checkpoint_dir / "ledger"
    return Ledger(folder, dp_rank=readers.get_local_rank(), dp_size=readers.size(), source=loader)


def build_tracker(
    settings: Settings, loader: Any, stages: list[VarlenPipelineStage], mesh: DeviceMesh, device: torch.device
) -> CostTracker | None:
    """Times every micro-batch on its stages, and logs what costs the timings show."""
    if not settings.learn_costs:
        return None
    if not isinstance(loader, StepLoader):
        raise SystemExit("--learn-costs goes with --method wlb and --plan static: elsewhere no packer plans by costs")
    costs, every = loader.packer.cost_model, settings.learn_costs
    tracker = CostTracker(costs, every=every, mesh=mesh, timer=StepTimer(device))
    tracker.timer.attach_stages(stages)
    return tracker


# --- checkpoints -----------------------------------------------------------------------------------------------------


def state_of(
    done: int, stages: list[VarlenPipelineStage], optimizers: list[torch.optim.Optimizer], data: dict[str, Any]
) -> dict[str, Any]:
    """Model, optimizer and the packer's queues, by names that know nothing of the layout."""
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    for stage, stage_optimizer in zip(stages, optimizers, strict=True):
        model |= get_model_state_dict(stage.submod)
        optimizer |= get_optimizer_state_dict(stage.submod, stage_optimizer, options=flat)
    return {"model": model, "optimizer": optimizer, "data": json.dumps(data), "done": done}


def state_after(step: AnyStep, loader: Any) -> dict[str, Any]:
    """Where to go on once `step` is trained, whatever was fetched since; the baselines fetch nothing ahead."""
    return loader.state_dict() if isinstance(loader, BaselineLoader) else step.state


def resume(
    settings: Settings,
    stages: list[VarlenPipelineStage],
    optimizers: list[torch.optim.Optimizer],
    loader: Any,
) -> int:
    """Loads the newest sound checkpoint, if there is one; gives the steps done."""
    checkpoint = checkpoints.newest(settings.checkpoint_dir) if settings.checkpoint_dir else None
    if checkpoint is None:
        if settings.checkpoint_dir and dist.get_rank() == 0:
            print(f"begins anew: {settings.checkpoint_dir} has no checkpoint", flush=True)
        return 0
    state = state_of(0, stages, optimizers, {})
    dcp.load(state, checkpoint_id=checkpoint)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    for stage, optimizer in zip(stages, optimizers, strict=True):
        names = get_model_state_dict(stage.submod)
        set_model_state_dict(stage.submod, {name: state["model"][name] for name in names})
        kept = get_optimizer_state_dict(stage.submod, optimizer, options=flat)
        set_optimizer_state_dict(
            stage.submod, optimizer, {name: state["optimizer"][name] for name in kept}, options=flat
        )
    loader.load_state_dict(json.loads(state["data"]))
    if dist.get_rank() == 0:
        print(f"resumed after step {state['done']} from {checkpoint}", flush=True)
    return int(state["done"])


# --- what a person sees ----------------------------------------------------------------------------------------------


def balance_of(plan: AnyPlan) -> tuple[list[int], float, float]:
    """Lengths of a step's documents, its work, and the largest over the mean: of micro-batches, or of ranks."""
    if isinstance(plan, wlb.DynamicCpPlan):
        groups = [group for micro_batch in plan for group in micro_batch]
        seconds = plan.rank_seconds.sum(axis=0)
        lengths = [int(length) for group in groups for length in group.lengths]
        return lengths, float(seconds.sum()), float(seconds.max() / seconds.mean())
    imbalance = plan.imbalance if plan.dp_size is None else plan.rank_imbalance
    return [int(length) for micro_batch in plan for length in micro_batch.lengths], float(plan.costs.sum()), imbalance


def waiting_of(step: AnyStep, loader: Any) -> dict[str, Any]:
    """How long documents waited so far, in iterations, and the tokens that wait now; the baselines let nothing wait."""
    if isinstance(loader, BaselineLoader):
        return {"delay_mean": 0.0, "delay_max": 0, "pending_tokens": 0}
    metrics, pending = loader.metrics(), step.snapshot.progress.tokens
    return {"delay_mean": metrics.delay_mean, "delay_max": metrics.delay_max, "pending_tokens": pending}


class Report:
    """Prints a line a step, and appends it to the log as JSON."""

    def __init__(self, settings: Settings, config: LlamaConfig, *, is_main: bool) -> None:
        self.settings, self.config, self.is_main = settings, config, is_main
        self.peak = peak_flops()
        self.work, self.steps = 0.0, 0

    def step(
        self,
        done: int,
        step: AnyStep,
        learnt: tuple[float, float] | None,
        load: Load | None,
        *,
        stall: float,
        seconds: float,
        loader: Any,
    ) -> None:
        """One line: what was learnt, how fast, how balanced it was and what waits. Without a label nothing was."""
        if not self.is_main:
            return
        lengths, work, imbalance = balance_of(step.plan)
        self.work, self.steps = self.work + work, self.steps + 1
        loss, norm = learnt or (None, None)
        row: dict[str, Any] = {
            "step": done,
            "loss": loss,
            "gradient_norm": norm,
            "tokens": sum(lengths),
            "tokens_per_second": sum(lengths) / seconds,
            "documents": len(lengths),
            "distinct_lengths": len(set(lengths)),
            "micro_batches": len(step.micro_batches),
            "micro_batch_tokens": [int(batch.shard.lengths.sum()) for batch in step.micro_batches],
            "imbalance": imbalance,
            "step_work": work * self.steps / self.work if self.work else 1.0,  # over the mean since the start
            **waiting_of(step, loader),
            "data_stall_ms": 1e3 * stall,
            "plan_ms": 1e3 * step.planning_seconds,
            "digest": step.plan.digest(),
            **({} if load is None else load.row()),
        }
        if self.peak is not None:
            flops = model_flops(lengths, **self.config.shape())
            world = dist.get_world_size()
            row["mfu"] = model_flops_utilization(flops, seconds=seconds, num_devices=world, peak=self.peak)
        mfu = f"  MFU {row['mfu']:.1%}" if "mfu" in row else ""
        experts = f"experts {load.imbalance:.2f}, ranks {load.rank_imbalance:.2f}  " if load is not None else ""
        what = f"none of {sum(lengths):,} tokens has a label: no update" if loss is None else f"loss {loss:.4f}"
        print(
            f"step {done:>5}/{self.settings.steps}  {what}  {row['tokens_per_second']:>8,.0f} tokens/s{mfu}  "
            f"imbalance {imbalance:.3f}  work {row['step_work']:.2f}  {experts}"
            f"delay {row['delay_mean']:.2f}, longest {row['delay_max']}  waiting {row['pending_tokens']:,} tokens  "
            f"stall {row['data_stall_ms']:.1f} ms  plan {row['plan_ms']:.2f} ms",
            flush=True,
        )
        if self.settings.metrics_file:
            with self.settings.metrics_file.open("a") as log:
                log.write(json.dumps(row) + "\n")


def option(field: str) -> str:
    """`--hidden` is short for `hidden_size`, `--layers` for `num_layers`."""
    short = {"hidden_size": "hidden", "ffn_hidden_size": "ffn", "shared_ffn_hidden_size": "shared-ffn"}
    return short.get(field, field.removeprefix("num_").replace("_", "-"))


app = App(default_parameter=Parameter(name_transform=option), version_flags=[])


@app.default
def main(*, settings: Annotated[Settings, Parameter(name="*")] = Settings()) -> None:
    """Trains a small Llama on real documents, packed by wlb."""
    train(settings)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    app()
