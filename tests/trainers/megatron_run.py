"""Training inside Megatron-Core on CPU: a tiny GPT on any layout of ranks, and a plain loop to compare it with.

Megatron-Core names the GPU in some places (`device="cuda"`, `torch.cuda.current_device()`); `on_cpu` lets the CPU stand
in there. Everything else of it runs as it is: its layers, schedules, communication between stages, gradient buffers and
optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import io
import os
import re
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.trainers.page import block

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.datasets import data_schedule
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

import wlb.torch as wt
from wlb.integrations import megatron

# As the installed version calls Dynamic-CP.
NAMES = inspect.signature(parallel_state.initialize_model_parallel).parameters
DYNAMIC = next(name for name in ("hybrid_context_parallel", "dynamic_context_parallel") if name in NAMES)
VOCABULARY, CONTEXT = 64, 64

if not hasattr(moe_utils, "te_general_gemm"):  # without Transformer Engine its routers ask for it all the same
    moe_utils.te_general_gemm = None


def documents() -> list[Any]:
    """A long tail, some beyond the context, some masked."""
    rng = np.random.default_rng(7)
    lengths = np.minimum(3 + (8 * rng.pareto(0.9, 220)).astype(int), 150)
    rows = [rng.integers(0, VOCABULARY, length) for length in lengths]
    masked = [np.where(np.arange(len(row)) < len(row) // 3, -100, row) for row in rows]
    return [row if at % 3 else {"input_ids": row, "labels": masked[at]} for at, row in enumerate(rows)]


@dataclass(frozen=True)
class Run:
    """A layout, and what differs from a plain run.

    Attributes:
        tp: tensor-parallel ranks.
        pp: stages.
        cp: context-parallel ranks.
        chunks: of the model on a rank.
        sequence_parallel: whether tensor-parallel ranks share tokens between layers.
        dynamic_cp: whether plans choose groups.
        steps: how many.
        begin: of every rank what to go on from, `Result.end`; None: the beginning.
        dies: every rank is killed after the sixth step, with what to go on from after the fifth in a file there.
        options: of `data_iterator`.
        config: of the model.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    chunks: int = 1
    sequence_parallel: bool = False
    dynamic_cp: bool = False
    steps: int = 20
    begin: list[bytes] | None = None
    dies: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def hybrid(rank: int, steps: int) -> tuple[list[float], list[list[tuple[int, ...]]]]:
    """Losses of Megatron-Core's own Dynamic-CP with wlb's scheduler in it, and how many ranks each document had.

    Its wrapper plans and moves documents, its schedule trains them one at a time; nothing of wlb but the scheduler and
    the layers.
    """
    from megatron.core.utils import get_batch_on_this_hybrid_cp_rank  # of some versions alone

    with (
        on_cpu(),
        warnings.catch_warnings(),
        mock.patch.object(data_schedule, "BalancedCPScheduler"),  # and puts theirs back
    ):
        warnings.simplefilter("ignore")
        exec(block("BalancedCPScheduler"), {})
        run = Run(dynamic_cp=True, config={"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": 16})
        initialize(run)
        model, optimizer = prepared(run)
        batches = data_schedule.HybridCPDataLoaderWrapper(iter(hybrid_batches(rank, steps)), model[0].config)
        losses: list[float] = []
        ranks: list[list[tuple[int, ...]]] = []

        def forward_step(data_iterator: Any, model: Any) -> Any:
            sample = next(data_iterator)
            size = int(sample.pop("local_cp_size"))
            batch, packed = get_batch_on_this_hybrid_cp_rank(sample, size)
            ranks[-1].append((size, packed.max_seqlen_q))
            given = batch["tokens"], batch["position_ids"], None
            output = model(*given, labels=batch["labels"], packed_seq_params=packed)
            return output, functools.partial(megatron.loss_func, batch["loss_mask"])

        for _ in range(steps):
            model[0].zero_grad_buffer()
            optimizer.zero_grad()
            ranks.append([])
            reports = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches,
                model=model,
                num_microbatches=1,
                seq_length=CONTEXT,
                micro_batch_size=1,
                forward_only=False,
            )
            optimizer.step()
            losses.append(megatron.mean_loss(reports))
        return losses, ranks


class _Norm(torch.nn.LayerNorm):
    """Megatron-Core's layer norms for sequence parallelism are Apex's and Transformer Engine's, which need a GPU."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **others: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function is Tensor.cuda:
            return args[0]
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """The CPU wherever Megatron-Core names the GPU."""
    names = ("synchronize", "manual_seed", "nvtx", "current_stream", "stream")
    nothing = dict.fromkeys(names, mock.DEFAULT)
    random = mock.patch.object(tensor_parallel, "get_cuda_rng_tracker")  # of dropout, of which there is none here
    wait = torch.distributed.barrier
    barrier = mock.patch.object(torch.distributed, "barrier", lambda group=None, **_: wait(group=group))
    with (
        _OnCpu(),
        random,
        barrier,
        mock.patch.multiple(torch.cuda, current_device=lambda: torch.device("cpu"), **nothing),
    ):
        yield


def configuration(run: Run, **others: Any) -> TransformerConfig:
    settings: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "use_cpu_initialization": True,
        "deallocate_pipeline_outputs": False,
        "pipeline_dtype": torch.float32,
        "batch_p2p_comm": False,
        "tensor_model_parallel_size": run.tp,
        "pipeline_model_parallel_size": run.pp,
        "context_parallel_size": run.cp,
        "virtual_pipeline_model_parallel_size": run.chunks if run.chunks > 1 else None,
        "sequence_parallel": run.sequence_parallel,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": run.pp > 1,
        "moe_token_dispatcher_type": "alltoall",  # the default refuses rows of many lengths, with no experts too
    }
    return TransformerConfig(**{**settings, **run.config, **others})


def build(run: Run, config: TransformerConfig, *, packed: bool = True) -> list[GPTModel]:
    """The chunks of this rank, of the same weights on every layout."""
    spec: Any = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    if run.sequence_parallel:
        norms = dataclasses.replace(spec.submodules, input_layernorm=_Norm, pre_mlp_layernorm=_Norm)
        layer = dataclasses.replace(spec, submodules=norms)
        spec = TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=_Norm)
    chunks = []
    for chunk in range(run.chunks):
        stage = chunk if run.chunks > 1 else None
        model = GPTModel(
            config=config,
            transformer_layer_spec=megatron.packed_layers(spec) if packed else spec,
            vocab_size=VOCABULARY,
            max_sequence_length=CONTEXT,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            position_embedding_type="rope",
            vp_stage=stage,
            mtp_block_spec=further(config, megatron.packed_layers(spec) if packed else spec),
        )
        for name, parameter in model.named_parameters():
            _fill(model, name, parameter)
        chunks.append(model)
    return chunks


def further(config: TransformerConfig, spec: Any) -> Any:
    """Layers of multi-token prediction, where the configuration has some and this is the last stage."""
    if not config.mtp_num_layers:
        return None
    return get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)


def _fill(model: GPTModel, name: str, parameter: Tensor) -> None:
    """The weights of the whole model by name; of a tensor-parallel rank its part."""
    if found := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
        name = f"{model.decoder.layers[int(found[1])].layer_number}.{found[2]}"
    tp, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    shape, dim = list(parameter.shape), getattr(parameter, "partition_dim", -1)
    split = getattr(parameter, "tensor_model_parallel", False) and tp > 1
    if split:
        shape[dim] *= tp
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    values = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if "norm" in name and name.endswith("weight"):
        values += 1
    with torch.no_grad():
        parameter.copy_(values.chunk(tp, dim)[rank] if split else values)


@dataclass(frozen=True)
class Result:
    """What a rank has after some steps.

    Attributes:
        losses: mean of each step; None but on the last stage.
        sizes: micro-batches of each step.
        padding: tokens of padding in each step.
        pieces: of each step int64 [pieces, 3]: document, start, length with padding; none on ranks that do not read.
        given: of each step, what the rank was given: "tokens", "labels".
        weights: of this rank, by name.
        end: what to go on from.
    """

    losses: list[float | None]
    sizes: list[int]
    padding: list[int]
    pieces: list[Any]
    given: set[str]
    weights: dict[str, Any]
    end: bytes | None


def of_page() -> dict[str, Any]:
    """What the page tells users to write."""
    names: dict[str, Any] = {}
    exec(block("def forward_step"), names)
    return names


def initialize(run: Run) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=run.pp,
        context_parallel_size=run.cp,
        virtual_pipeline_model_parallel_size=run.chunks if run.chunks > 1 else None,
        **{DYNAMIC: run.dynamic_cp},
    )


def prepared(run: Run) -> tuple[list[Any], Any]:
    """The model of this rank under Megatron-Core's gradient buffers, and its optimizer."""
    config = configuration(run)
    config.finalize_model_grads_func = finalize_model_grads
    buffers = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
    model = [DistributedDataParallel(config, buffers, chunk) for chunk in build(run, config)]
    adam = OptimizerConfig(optimizer="adam", lr=3e-3, weight_decay=0.0, clip_grad=0.0, params_dtype=torch.float32)
    return model, get_megatron_optimizer(adam, model)


def train(rank: int, run: Run) -> Result:
    """Trains with the page's loop."""
    with on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        initialize(run)
        model, optimizer = prepared(run)
        options = {
            "max_tokens_per_rank": CONTEXT,
            "max_document_tokens": CONTEXT,
            "tokens_per_batch": 300,
            "dynamic_cp": run.dynamic_cp,
            "num_epochs": 3,
        }
        data = megatron.data_iterator(documents(), model=model, **{**options, **run.options})
        if run.begin is not None:
            weights, state, where = torch.load(io.BytesIO(run.begin[rank]), weights_only=False)
            for chunk, found in zip(model, weights, strict=True):
                chunk.load_state_dict(found)
            optimizer.load_state_dict(state)
            data.load_state_dict(where)
        found = Result([], [], [], [], set(), {}, None)
        for step, loss in of_page()["train"](model, optimizer, data):
            found.losses.append(loss)
            found.sizes.append(len(step.batches))
            found.padding.append(step.padding_tokens)
            found.given.update(name for name in ("tokens", "labels") if getattr(step.batches[0], name) is not None)
            if step.source is not None and parallel_state.get_context_parallel_rank() == 0:
                pieces = step.source.pieces
                rows = np.stack([pieces.ids % len(documents()), pieces.starts, pieces.lengths], axis=1)
                found.pieces.append(rows)
            end = io.BytesIO()  # tensors that are sent as they are would be shared with this process, which ends
            if len(found.sizes) == (run.steps if run.dies is None else 5):
                torch.save(([chunk.state_dict() for chunk in model], optimizer.state_dict(), step.state), end)
            if len(found.sizes) == 5 and run.dies is not None:
                (run.dies / str(rank)).write_bytes(end.getvalue())
            if len(found.sizes) == 6 and run.dies is not None:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            if len(found.sizes) == run.steps:
                break
        data.close()
        weights = {
            f"{chunk} {name}": parameter.detach().numpy().copy()
            for chunk, part in enumerate(model)
            for name, parameter in part.named_parameters()
        }
        return Result(found.losses, found.sizes, found.padding, found.pieces, found.given, weights, end.getvalue())


def reference(rank: int, steps: list[list[tuple[Any, Any]]]) -> list[float]:
    """The mean loss of every step, of Megatron-Core's plain GPT on one document at a time.

    Args:
        rank: the only one.
        steps: of each a list of tokens with their labels, shifted, -100 where nothing is learnt.
    """
    with on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run()
        initialize(run)
        [model] = build(run, configuration(run), packed=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        losses = []
        for pieces in steps:
            optimizer.zero_grad()
            total, count = torch.zeros(()), 0
            for tokens, labels in pieces:
                learnt = torch.from_numpy(labels != wt.IGNORE)
                size = len(tokens)
                hidden = torch.ones(size, size).triu(1).bool()[None, None]
                positions = torch.arange(size)[None]
                given = torch.from_numpy(tokens)[None], torch.from_numpy(np.maximum(labels, 0))[None]
                output = model(given[0], positions, hidden, labels=given[1])
                loss = (output[0] * learnt).sum()
                loss.backward()
                total, count = total + loss.detach(), count + int(learnt.sum())
            for parameter in model.parameters():
                parameter.grad /= count
            optimizer.step()
            losses.append(float(total) / count)
        return losses


def hybrid_pieces(steps: int) -> list[Any]:
    """Of each step whole documents, padded to what groups of 4 ranks take: int64 [documents, 3] as in `Result`."""
    rows = [at for at, row in enumerate(documents()) if not isinstance(row, dict) and len(row) <= CONTEXT]
    groups = np.split(np.array(rows[: 12 * steps]), steps)
    return [np.array([(at, 0, len(documents()[at])) for at in group]) for group in groups]


def hybrid_batches(rank: int, steps: int) -> list[list[dict[str, Tensor]]]:
    """What a data-parallel rank reads for each step: its documents, packed, as Megatron-Core takes them."""
    found = []
    for pieces in hybrid_pieces(steps):
        mine = alone(pieces[rank::4])
        sizes = [-(-len(tokens) // 8) * 8 for tokens, _ in mine]
        columns: dict[str, list[Any]] = {"tokens": [], "labels": [], "loss_mask": [], "position_ids": []}
        for (tokens, labels), size in zip(mine, sizes, strict=True):
            more = size - len(tokens)
            columns["tokens"].append(np.pad(tokens, (0, more)))
            columns["labels"].append(np.pad(np.maximum(labels, 0), (0, more)))
            columns["loss_mask"].append(np.pad((labels != wt.IGNORE).astype(np.float32), (0, more)))
            columns["position_ids"].append(np.arange(size))
        sample = {name: torch.from_numpy(np.concatenate(values)) for name, values in columns.items()}
        found.append([sample | {"cu_seqlens": torch.tensor(np.append(0, np.cumsum(sizes)))}])
    return found


def alone(pieces: Any) -> list[tuple[Any, Any]]:
    """The documents of these pieces, without padding: tokens, and labels that reach over cuts."""
    rows = documents()
    found = []
    for number, start, length in pieces.tolist():
        row = rows[number]
        tokens, labels = (row["input_ids"], row["labels"]) if isinstance(row, dict) else (row, row)
        after = np.append(labels[1:], wt.IGNORE)
        found.append((tokens[start : start + length], after[start : start + length]))
    return found
