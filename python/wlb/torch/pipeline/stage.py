"""A pipeline stage whose receive buffers follow the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from typing_extensions import override

import wlb
from wlb._errors import error
from wlb.torch.lazy import dtensor, fsdp2
from wlb.torch.pipeline.escape import escaping
from wlb.torch.pipeline.micro_batch import PipelineMicroBatch

_ONCE = "only allowed to backward once"  # of torch's selective checkpointing


class VarlenPipelineStage(PipelineStage):
    """A stage of a pipeline whose micro-batches differ in length.

    torch's own stage takes the shapes of micro-batch 0 for all of them: a longer one aborts the process, a shorter one
    is received into a larger buffer whose tail is stale. This stage learns the token counts of every step
    (`wlb.torch.pipeline.pipeline_step` tells it) and allocates each receive buffer for its micro-batch. Nothing is
    sent for an activation without elements.

    The module is called as `submodule(*args, **kwargs)` on the first stage and `submodule(activation, **kwargs)` on the
    others, and returns one plain tensor; the last stage's may return anything that the loss function takes. It may be
    under FSDP2: call `fully_shard(submodule)` first, best with `reshard_after_forward=False`, also inside it, which
    saves an all-gather for every micro-batch.

    Args:
        submodule: the layers of this stage.
        stage_index: index of this stage, from 0. `stages_of_rank` gives the stages of a rank.
        num_stages: stages of the whole pipeline.
        device: where it computes.
        group: the ranks of this pipeline; the default group if `None`.
        hidden_size: activations between stages are `[tokens, hidden_size]`.
        activation_shape: instead of `hidden_size`: the shape of an activation between stages on this rank as a function
            of `tokens`, such as `lambda tokens: (tokens // tp, hidden_size)` with sequence parallelism. It must be the
            same for all stages.
        dtype: dtype of activations and of their gradients.

    Raises:
        WlbError: an index out of range, or not exactly one of `hidden_size` and `activation_shape`.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        *,
        group: dist.ProcessGroup | None = None,
        hidden_size: int | None = None,
        activation_shape: Callable[[int], Sequence[int]] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not 0 <= stage_index < num_stages:
            raise error("stage_index", f"is {stage_index}, with num_stages={num_stages}", value=stage_index)
        if (hidden_size is None) == (activation_shape is None):
            raise error("hidden_size", "or activation_shape is needed, and not both", value=hidden_size)
        if hidden_size is not None and hidden_size < 1:
            raise error("hidden_size", f"is {hidden_size}", value=hidden_size)
        # Shapes given in advance spare torch a warm-up pass to find them; only their number matters, all else is below.
        placeholder = torch.empty(0, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)
        super().__init__(
            submodule,
            stage_index,
            num_stages,
            torch.device(device),
            input_args=placeholder,
            output_args=placeholder,
            group=group,
        )
        self.dtype = dtype
        self.schedules: dict[Any, Any] = {}  # those that run this stage and its fellows on this rank, see schedule.py
        self.unusable = ""  # the reason, if the stage is unusable
        self.timer: Callable[[int], AbstractContextManager[None]] | None = None  # of `StepTimer`: by micro-batch
        self._hidden_size = hidden_size
        self._activation_shape = activation_shape
        self._micro_batches: Sequence[PipelineMicroBatch] = ()
        self._shapes: list[tuple[int, ...]] = []
        self._running = 0  # the micro-batch whose forward runs
        self._activations: dict[int, Tensor] = {}  # received, not yet used; by micro-batch
        self._gradients: dict[int, Tensor] = {}

    def activation_shape(self, tokens: int) -> tuple[int, ...]:
        """The shape of an activation between stages."""
        if self._activation_shape is not None:
            return tuple(self._activation_shape(tokens))
        assert self._hidden_size is not None
        return tokens, self._hidden_size

    def begin(self, micro_batches: Sequence[PipelineMicroBatch]) -> None:
        """Tells the stage the micro-batches of the next step."""
        self.forget()
        self.chunks = len(micro_batches)
        self._micro_batches = micro_batches
        self._shapes = [self.activation_shape(micro_batch.tokens) for micro_batch in micro_batches]

    def timed(self, micro_batch: int) -> AbstractContextManager[None]:
        """Context for the computation of a micro-batch."""
        return self.timer(micro_batch) if self.timer is not None else nullcontext()

    def forget(self, *, failed: bool = False) -> None:
        """Releases all tensors of a step. A failed step that cannot be undone makes the stage unusable."""
        if failed and self.group_size > 1:
            self.unusable = "messages are still under way in its process group"
        elif failed and self.has_backward and self._fsdp_modules():
            self.unusable = "its FSDP modules still hold a part of the gradients"
        for held in (self.backward_state, self.dw_runner, self.bwd_cache, self._activations, self._gradients):
            held.clear()
        self._forwarded.clear()
        self.output_chunks.clear()

    @property
    def _forwarded(self) -> dict[int, Any]:
        """The inputs and outputs of each micro-batch, which torch releases in its backward pass."""
        states: dict[int, Any] = vars(self)["fwd_cache" if hasattr(self, "fwd_cache") else "_forward_chunk_states"]
        return states  # the second name is that of torch 2.15

    # What a stage computes. Keyword arguments bypass torch, whose zero-bubble schedules in 2.11 only take tensors.

    @override
    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        self._running = fwd_chunk_id
        with escaping(), self.timed(fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, args, {}, save_forward_output)
        if not self.has_backward and not self._sends:
            del self._forwarded[fwd_chunk_id]
        return output

    @override
    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        kwargs = dict(self._micro_batches[self._running].kwargs)
        output = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.is_last:
            return output
        shape = self._shapes[self._running]
        if not isinstance(output, Tensor) or isinstance(output, dtensor()):
            raise self._refused(f"returned a {type(output).__name__}, not one plain tensor", type(output))
        if output.shape != shape or output.dtype != self.dtype:
            message = f"returned {list(output.shape)} {output.dtype}, the plan says {list(shape)} {self.dtype}"
            raise self._refused(message, tuple(output.shape))
        # Split backward passes detach outputs in place, which a view does not allow.
        return output.clone(memory_format=torch.contiguous_format) if output._is_view() else output.contiguous()

    def _refused(self, message: str, value: object) -> wlb.WlbError:
        return error("submodule", f"of stage {self.stage_index} {message}", index=self._running, value=value)

    @override
    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with escaping(), self.timed(bwd_chunk_id), nullcontext() if full_backward else self._split(bwd_chunk_id):
            if not full_backward:
                self._unshard()
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            if self.has_backward and not self.is_first:
                gradient = self.bwd_cache[bwd_chunk_id][0]
                if gradient is None:  # the module did not use its input
                    gradient = torch.zeros(self._shapes[bwd_chunk_id], dtype=self.dtype, device=self.device)
                    if gradient.numel() and not full_backward:
                        message = f"of stage {self.stage_index} ignores its input: a split backward loses its gradients"
                        raise error("submodule", message, index=bwd_chunk_id)
                self.bwd_cache[bwd_chunk_id] = (gradient.contiguous(),)

    @override
    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with escaping(), self.timed(bwd_chunk_id), self._split(bwd_chunk_id):
            self._unshard()
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    @override
    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)
        else:
            for module in self._fsdp_modules():
                module.reshard()

    @contextmanager
    def _split(self, micro_batch: int) -> Iterator[None]:
        """Context for either part of a split backward pass: names checkpoints that allow only one backward.

        Both parts use the same activations, so `GraphExecGroup` does not help.
        """
        try:
            yield
        except RuntimeError as cause:
            if _ONCE not in str(cause):
                raise
            message = (
                f"of stage {self.stage_index} checkpoints selectively (context_fn), which allows one backward, and "
                "this schedule runs two, for inputs and for weights: checkpoint without context_fn, or take one that "
                'does not split it: "1f1b", "interleaved_1f1b", "gpipe"'
            )
            raise error("submodule", message, index=micro_batch) from cause

    def _unshard(self) -> None:
        """Gathers the weights that FSDP has sharded, for a backward pass in two parts.

        torch looks for weights before FSDP's own hooks gather them, and would leave out all sharded ones.
        """
        for module in self._fsdp_modules():
            module.unshard()

    def _fsdp_modules(self) -> list[Any]:
        return [module for module in self.submod.modules() if isinstance(module, fsdp2())]

    # Between stages: receive into buffers of our own.

    @override
    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return [] if self.is_first else self._receive(self._activations, fwd_chunk_id, self.stage_index - 1)

    @override
    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward:
            return []
        return self._receive(self._gradients, bwd_chunk_id, self.stage_index + 1)

    @property
    def _sends(self) -> bool:
        """Whether outputs go to another rank: not on the last stage, nor at the bottom of a V schedule."""
        return not self.is_last and self.stage_index_to_group_rank[self.stage_index + 1] != self.group_rank

    @override
    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self._sends:
            return []
        operations = [op for op in super().get_fwd_send_ops(fwd_chunk_id) if op.tensor.numel()]
        if not self.has_backward:
            del self._forwarded[fwd_chunk_id]  # the operations hold what they send
        return operations

    @override
    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return [op for op in super().get_bwd_send_ops(bwd_chunk_id) if op.tensor.numel()]

    @override
    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self._activations[mb_index] = prev_stage_outputs.detach()

    @override
    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        if not self.has_backward:
            return ()
        gradients: tuple[Tensor | None, ...] = super().get_local_bwd_output(mb_index)  # type: ignore[no-untyped-call]
        return gradients

    @override
    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            (gradient,) = next_stage_bwd_outputs
            assert gradient is not None  # see backward_one_chunk
            self._gradients[mb_index] = gradient

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        return (self._activations.pop(fwd_chunk_id).requires_grad_(self.has_backward),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor, ...]:
        return (self._gradients.pop(bwd_chunk_id),)

    def _receive(self, buffers: dict[int, Tensor], micro_batch: int, source: int) -> list[dist.P2POp]:
        buffer = torch.empty(self._shapes[micro_batch], dtype=self.dtype, device=self.device)
        buffers[micro_batch] = buffer
        if not buffer.numel():
            return []
        group = self.group
        if hasattr(self, "_get_p2p_group"):  # 2.15: torch may be told to use a group for each pair of ranks
            group = self._get_p2p_group(source, self.stage_index)
        peer = self.stage_index_to_group_rank[source]
        if self.group is not None:
            peer = dist.get_global_rank(self.group, peer)
        return [dist.P2POp(dist.irecv, buffer, peer, group)]

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Torch 2.11 opens connections to all neighbours; in V schedules also from a rank to itself, which fails."""
        operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()  # type: ignore[misc]
        return [op for op in operations if op.peer != dist.get_rank()]

    # Methods of torch for shapes that never change, which must do nothing here.

    def _validate_stage_tensors(self, desc: str, expected: Any, actual: Any) -> None:
        """2.12 and newer compare with micro-batch 0; `forward_maybe_with_nosync` compares with the plan."""

    def _validate_fwd_input(self, args: Any, kwargs: Any) -> None:
        """The name of this method in torch 2.11."""

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """The name of this method in torch 2.11."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Would drop the gradients of FSDP modules whenever a step has a number of micro-batches not seen before."""
