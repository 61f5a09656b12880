"""Reads the layers of a model that transformers built: parameters from its modules, FLOPs from a forward of it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from wlb.models import visible
from wlb.models.attention import Attention, Indexer, LatentAttention
from wlb.models.blocks import Block, Mask, Matrix
from wlb.models.counted import CountedBlock
from wlb.models.feed_forward import FeedForward
from wlb.models.forward import Forward, run
from wlb.models.keys import Refused
from wlb.models.layers import Layer
from wlb.models.weights import Weight, flops, matrices, vectors, weights


@dataclass(frozen=True)
class Built:
    """Sizes and layers of a model that transformers built."""

    hidden_size: int
    vocab_size: int
    embedding_size: int  # width of the embedding's rows
    layers: tuple[Layer, ...]
    tied: bool  # whether embedding and output projection are one weight, or there is no output projection
    other_parameters: int  # outside layers, embedding, output projection and the last norm
    assumptions: tuple[str, ...]  # sentences for the user


_RECURRENT = re.compile(
    r"Mamba|SSM|Mixer$|Delta|Rwkv|RWKV|LSTM|Recurrent|RGLRU|RgLru|Lightning|LinearAttention|Retention|KDA|Conv(?!1D)"
)
_ELEMENT_WISE = re.compile(r"ShortConv|RecurrentGemma|Rwkv")
"""States without products, whose work is not counted."""

_OTHER_TOWER = re.compile(
    r"vision|visual|audio|image|speech|sound|video|vit\b|vqmodel|vqgan|tower|resampler|qformer|perceiver|"
    r"projector|depth_decoder|generation|mtp|patcher|action|expert_model",
    re.IGNORECASE,
)
_VISITED = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "moe_topk",
    "top_k_experts",
    "num_selected_experts",
    "moe_k",
    "top_k",
    "n_activated_experts",
)
"""Keys of the number of experts that a token visits."""

Part = tuple[str, Any]
"""Path below the layer and module."""


@dataclass
class Reader:
    """Reads one model."""

    whole: Any  # transformers' configuration of the whole model
    model: Any
    assumptions: list[str] = field(default_factory=list)
    forward: Forward = field(init=False)

    def read(self) -> Built:
        """The sizes and layers of the model.

        Raises:
            Refused: what some part of it costs is not known.
        """
        config = self.config = self.whole.get_text_config(decoder=True)
        languages = self._get("languages")
        if isinstance(languages, (list, tuple)) and len(languages) > 1:  # X-MOD
            raise Refused(f"has adapters of {len(languages)} languages, of which a token meets one", None)
        if self._get("use_bidirectional_attention") is True:
            raise Refused("has use_bidirectional_attention: a decoder's attention is causal", True)
        if self._get("ngram"):  # ProphetNet
            raise Refused(
                "has ngram: streams that predict further tokens, which see other keys than the main one", None
            )
        if self._get("zero_expert_num"):
            raise Refused("has zero_expert_num: a token visits fewer experts the more of these it visits", None)
        paths, stack = self._stack()
        self.hidden = visible.integer(config, "hidden_size", "d_model", "n_embd", "word_embed_dim")
        each = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * len(stack)
        kinds = [visible.kind_of(each[index], layer, index, len(stack)) for index, layer in enumerate(stack)]
        alike: list[tuple[Any, ...]] = [
            (type(layer), kind, _shapes(layer)) for layer, kind in zip(stack, kinds, strict=True)
        ]
        first = {key: index for index, key in reversed([*enumerate(alike)])}
        self._run(paths, stack, sorted(first.values()))
        if len(self.chosen) == len(stack):  # a token may meet equal layers a different number of times (HRM)
            alike = [(*key, self.forward.work(layer)) for key, layer in zip(alike, stack, strict=True)]
            first = {key: index for index, key in reversed([*enumerate(alike)])}
        found = {}
        for key, index in first.items():
            self.config = each[index]
            found[key] = self._layer(stack[index], kinds[index])
        self.config = config
        layers = [found[key] for key in alike]
        beside = self._beside(stack)
        if beside is not None:
            layers[0] = dataclasses.replace(layers[0], sublayers=(*layers[0].sublayers, beside))
        return self._whole(", ".join(paths), layers)

    def _get(self, name: str) -> Any:
        return visible.get(self.config, name)

    def _assume(self, sentence: str) -> None:
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)

    # The stack of layers.

    def _stack(self) -> tuple[list[str], Sequence[Any]]:
        """Paths of the lists of layers, and the layers."""
        from torch import nn

        names = ("decoder_layers", "num_layers_per_stack", "num_hidden_layers", "num_layers", "n_layer", "n_layers")
        counts = [value for name in names if isinstance(value := self._get(name), int) and value]
        for count in counts:
            if found := self._stacks(count):
                break
        else:
            raise Refused(f"has {counts} layers, which are not found in {type(self.model).__name__}", None)
        largest = max(found, key=lambda each: each[0])
        apart = [each for each in found if each is largest or (each[0] and not each[1].startswith(f"{largest[1]}."))]
        paths, lists = [path for _, path, _ in apart], [modules for _, _, modules in apart]
        if (
            len(lists) == 1 or len({type(module) for modules in lists for module in modules}) == 1
        ):  # one stack after the other
            return paths, [module for modules in lists for module in modules]
        if len({path.rpartition(".")[0] for path in paths}) > 1:
            raise Refused(f"has several stacks of {count} layers: {', '.join(paths)}", None)
        leaves = [path.rpartition(".")[2] for path in paths]  # XLM: a layer's modules are in lists of their own
        return paths, [nn.ModuleDict(dict(zip(leaves, modules, strict=True))) for modules in zip(*lists, strict=True)]

    def _stacks(self, count: int) -> list[tuple[int, str, Sequence[Any]]]:
        """Parameters, path and modules of every list of `count` modules. Skips an encoder's lists if others exist."""
        from torch import nn

        found: list[tuple[int, str, Any]] = [
            (sum(parameter.numel() for parameter in module.parameters()), name, module)
            for name, module in self.model.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == count and not _OTHER_TOWER.search(name)
        ]
        decoders = [each for each in found if not re.search(r"(^|\.)encoder(\.|$)", each[1])]
        return decoders or found

    # The run.

    def _run(self, paths: Sequence[str], stack: Sequence[Any], distinct: Sequence[int]) -> None:
        """Counts a forward of one layer of each kind, or of all layers if the model cannot run with fewer.

        Raises:
            Refused: it runs neither way.
        """
        from torch import nn

        holder, _, name = paths[0].rpartition(".")
        inner = self.model.get_submodule(holder)
        whole, unit = range(len(stack)), visible.unit(self.config)
        self._batch_experts()
        self._give_each_head_its_keys()
        rotations, experts = self._rotations(), self._experts()
        tried = [each for each in (rotations, experts, rotations | experts) if each]
        for stand_ins in ({}, *tried[: 3 if rotations and experts else 1]):
            for chosen in (distinct, whole) if len(paths) == 1 else (whole,):
                layers = getattr(inner, name)
                if len(paths) == 1:
                    setattr(inner, name, nn.ModuleList([stack[index] for index in chosen]))
                for module, forward in stand_ins.items():
                    module.forward = forward
                ran = run(self.model, inner, stack[chosen[0]], hidden=self.hidden, unit=unit)
                for module in stand_ins:
                    del module.forward
                setattr(inner, name, layers)
                if ran is None:
                    continue
                self.forward, self.chosen = ran, chosen
                self.passed_over = bool(experts) and stand_ins.keys() >= experts.keys()
                if rotations and stand_ins.keys() >= rotations.keys():
                    self._assume("positions are not rotated in the run: their sizes fit no head")
                if self.passed_over:
                    self._assume("what routed experts compute is not held to a run of the model, which needs data")
                return
        raise Refused("cannot be run without data: what its layers cost is not known", None)

    def _batch_experts(self) -> None:
        """Makes each token compute with the experts that it visits alone, where the model can."""
        with contextlib.suppress(Exception):  # transformers raises any type where experts have one implementation
            self.model.set_experts_implementation("batched_mm")

    def _give_each_head_its_keys(self) -> None:
        """In latent attention every query head has keys of its own, whatever number of key heads a file says."""
        if self._get("kv_lora_rank"):
            for module in self.model.modules():
                if hasattr(module, "num_key_value_groups"):
                    module.num_key_value_groups = 1

    def _rotations(self) -> dict[Any, Any]:
        """Modules that rotate positions, each with a forward that turns nothing: rotations cost no product."""
        import torch

        heads = visible.get(self.config, "num_attention_heads")
        width = visible.get(self.config, "head_dim") or (self.hidden // heads if isinstance(heads, int) else 0)

        def turn_nothing(rows: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
            ones = torch.ones((1, rows.shape[-2], width), device="meta")
            return ones, ones

        found = [module for module in self.model.modules() if "Rotary" in type(module).__name__]
        return dict.fromkeys(found, turn_nothing) if width else {}

    def _experts(self) -> dict[Any, Any]:
        """Modules of routed experts, each with a forward that gives zeros."""
        import torch

        def give_zeros(rows: Any, *_: Any, **__: Any) -> Any:
            return torch.zeros_like(rows)

        found = [module for module in self.model.modules() if type(module).__name__.endswith("Experts")]
        return dict.fromkeys(found, give_zeros)

    # One layer.

    def _layer(self, module: Any, kind: tuple[str, int]) -> Layer:
        parts = [*_mixers(module)]
        taken = {id(parameter) for _, part in parts for parameter in part.parameters()}
        mixers = [self._mixer(part, kind) for part in parts]
        rest = self._weights([("", module)], without=taken)
        if self.passed_over:
            read = {each for weight in rest if weight.matrix and weight.matrix.copies > 1 for each in weight.ids}
            experts = [inner for inner in module.modules() if type(inner).__name__.endswith("Experts")]
            if any(id(each) not in read for inner in experts for each in inner.parameters()):
                name = type(experts[0]).__name__
                raise Refused(f"has {name}, which cannot be run without data and are not understood", name)
        work = self.forward.work(module)
        for _, part in parts:
            work = work - self.forward.work(part)
        if work.pair or work.rest:
            raise Refused(f"has {type(module).__name__} with work that is of no attention: not understood", None)
        blocks: list[Block | tuple[Block, ...]] = [tuple(mixers)] if len(mixers) > 1 else [*mixers]
        norms = sum(each.count for each in rest)
        feed_forward = self._feed_forward(rest, self._beyond(rest, work.token))
        if feed_forward is not None:
            blocks.append(feed_forward)
            norms -= feed_forward.parameters(self.hidden)
        of_rows, left = divmod(max(norms, 0), self.hidden)
        streams = self.forward.streams
        if left or norms < 0 or streams > 1:
            blocks.append(CountedBlock(weights=(), other_parameters=max(left, 0), streams=streams))
        if not blocks:
            raise Refused(f"has a layer {type(module).__name__} without parameters", None)
        layer = Layer(tuple(blocks), norms=of_rows)
        counted = sum(parameter.numel() for parameter in module.parameters())
        if layer.parameters(self.hidden) != counted:
            message = f"has a layer {type(module).__name__} of {counted} parameters, read as"
            raise Refused(f"{message} {layer.parameters(self.hidden)}: that is not understood", counted)
        return layer

    def _weights(self, parts: Sequence[Part], *, without: set[int] = frozenset()) -> list[Weight]:  # type: ignore[assignment]
        found = weights(parts, self.forward, hidden=self.hidden, visited=self._visited(), idle=self.passed_over)
        return [each for each in found if not each.ids & without]

    def _visited(self) -> int:
        for name in _VISITED:
            value = self._get(name)
            if isinstance(value, (list, tuple)) and value and len({*value}) == 1:
                value = value[0]
            if isinstance(value, int) and value > 0:
                return value
        return 0

    def _beyond(self, found: Sequence[Weight], token: int) -> int:
        """FLOPs of a token that the run counts beside the matrices. Matrices that run in another module's code are met.

        Raises:
            Refused: the run counts less than the matrices.
        """
        if any(each.matrix is not None and each.matrix.copies > 1 and not self._visited() for each in found):
            raise Refused("has experts, and how many of them a token visits is not found in its configuration", None)
        beyond = token - flops(matrices(found)) - sum(each.uncounted for each in found)
        idle = [each for each in found if each.matrix is not None and not each.matrix.used]
        if beyond and beyond == flops(dataclasses.replace(m, used=1) for m in matrices(idle)):
            for each in idle:
                assert each.matrix is not None
                each.matrix = dataclasses.replace(each.matrix, used=1)
            return 0
        if beyond < 0:
            raise Refused(f"computes {token} FLOPs of a token in matrices of {token - beyond}: not understood", token)
        names = ", ".join(each.name for each in idle if not each.name.endswith(("embed", "embedding", "embeddings")))
        if names:
            self._assume(f"these have parameters and no work, since a document does not meet them: {names}")
        return beyond

    # Attention and states.

    def _mixer(self, part: Part, kind: tuple[str, int]) -> Block:
        found = self._weights([part])
        name = type(part[1]).__name__
        recurrent, state = _RECURRENT.search(name), _state_flops(part[1])
        if recurrent and (state or not self.forward.work(part[1]).pair):
            if not state and not _ELEMENT_WISE.search(name):
                raise Refused(f"has {name}: what its state costs is not known to wlb", name)
            return self._state(found, *(state or (0, 0)))
        return self._attention(part[1], found, kind)

    @staticmethod
    def _state(found: list[Weight], heads: int, states: int) -> Block:
        """A recurrent mixer: its matrices, convolutions and state.

        Reference implementations compute states in different ways, by products that kernels do not need. So what the
        run counts of states does not count.
        """
        for each in found:
            if each.matrix is not None:
                each.matrix = dataclasses.replace(each.matrix, used=1)
        convolutions = [each for each in found if each.channels]
        return CountedBlock(
            weights=matrices(found),
            other_parameters=vectors(found),
            other_flops=2 * sum(each.count for each in convolutions) + states,
            channels=sum(each.channels for each in convolutions),
            num_heads=heads,
        )

    def _attention(self, part: Any, found: list[Weight], kind: tuple[str, int]) -> Block:
        """`Attention` or `LatentAttention` if one has the module's parameters and FLOPs, otherwise a `CountedBlock`."""
        work = self.forward.work(part)
        beyond = self._beyond(found, work.token)
        if not work.pair:
            return CountedBlock(weights=matrices(found), other_parameters=vectors(found), other_flops=beyond)
        if work.rest:
            raise Refused(f"has {type(part).__name__}, whose work is not that of pairs and tokens", None)
        heads = _first(part, self.config, "num_heads", "num_attention_heads", "n_heads", "n_head", "num_q_heads", "nh")
        if not heads:
            raise Refused(f"has {type(part).__name__}, whose heads are not found", None)
        indexers = [module for module in part.modules() if type(module).__name__.endswith("Indexer")]
        scores = sum(self.forward.work(module).pair for module in indexers)
        pairs = visible.seen(self.config, part, kind, work.pair - scores, self._scores(scores))
        head_dim = _first(part, self.config, "head_dim", "attention_head_size", "head_size", "d_head", "d_kv")
        rank, rope = self._get("kv_lora_rank"), self._get("qk_rope_head_dim")
        narrow = rank + rope if isinstance(rank, int) and isinstance(rope, int) else 0
        compressed = self._get("compress_rates")
        if not head_dim or narrow or ((work.pair - scores) % (4 * heads * head_dim) and not compressed):
            head_dim = math.ceil((work.pair - scores) / 4 / heads)  # the mean of keys' and values' widths
        kv_heads = heads if narrow else self._kv_heads(part, heads, head_dim, found)
        described = [*self._plain(heads, kv_heads, head_dim, next(iter(pairs))), *self._latent(heads, indexers)]
        counted = sum(each.count for each in found)
        for block in described:
            same = block.parameters(self.hidden) == counted and block.token_flops(self.hidden) == work.token
            if same and dict(block.pairs()) == pairs and not any(each.channels for each in found):
                return block
        index = self._get("index_head_dim") or self._get("indexer_head_dim") or 0
        kv_width = narrow or 2 * kv_heads * head_dim + (index if indexers else 0)
        if compressed and not narrow:  # keys are the values, and `rate` tokens share a compressed one
            rate = compressed.get(kind[0])
            kv_width = head_dim + (
                math.ceil(head_dim / rate) + math.ceil((index if indexers else 0) / rate) if rate else 0
            )
        return CountedBlock(
            weights=matrices(found),
            other_parameters=vectors(found),
            attention=tuple(pairs.items()),
            other_flops=beyond,
            channels=sum(each.channels for each in found),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            kv_width=kv_width,
        )

    def _scores(self, scores: float) -> float:
        """FLOPs of an indexer for a pair. DeepSeek V4's code adds its heads' scores by no product that would count."""
        width = self._get("index_head_dim")
        return scores * (1 + 1 / width) if self._get("compress_rates") and width else scores

    def _kv_heads(self, part: Any, heads: int, head_dim: int, found: Sequence[Weight]) -> int:
        keys = [each for each in found if re.search(r"(^|[._])(k|key|wk)(_|\.|$|proj|lin)", each.name)]
        for key in reversed(keys):
            if key.matrix is not None and "index" not in key.name and key.matrix.columns % head_dim == 0:
                return max(1, key.matrix.columns // head_dim)
        groups = getattr(part, "num_key_value_groups", 0)
        if groups and heads % groups == 0:
            return int(heads // groups)
        said = _first(part, self.config, "num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_heads_k")
        return said if said and heads % said == 0 else heads

    def _plain(self, heads: int, kv_heads: int, head_dim: int, mask: Mask) -> Iterator[Attention]:
        """Attention with these heads."""
        if heads % kv_heads:
            return
        flags = (False, True)
        for qkv, output, norm, gated, sinks in itertools.product(flags, flags, ("none", "head", "all"), flags, flags):
            yield Attention(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                mask=mask,
                qkv_bias=qkv,
                output_bias=output,
                qk_norm=norm,  # type: ignore[arg-type]
                gated=gated,
                sinks=sinks,
            )

    def _latent(self, heads: int, indexers: Sequence[Any]) -> Iterator[LatentAttention]:
        """Latent attention of the sizes in the configuration."""
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        rank, key, rope, value = (self._get(name) for name in names)
        if not all(isinstance(size, int) and size for size in (rank, key, rope, value)):
            return
        top, of_index = self._get("index_topk"), None
        if indexers and isinstance(top, int):
            sizes = [getattr(indexers[0], name, None) for name in ("n_heads", "head_dim")]
            if not all(isinstance(size, int) for size in sizes) or not self._get("q_lora_rank"):
                return
            of_index = Indexer(num_heads=sizes[0], head_dim=sizes[1], top_k=top)  # type: ignore[arg-type]
        for bias in (False, True):
            yield LatentAttention(
                num_heads=heads,
                kv_rank=rank,
                key_dim=key,
                rope_dim=rope,
                value_dim=value,
                query_rank=self._get("q_lora_rank") or 0,
                bias=bias,
                indexer=of_index,
            )

    # Feed-forward blocks.

    def _feed_forward(self, rest: Sequence[Weight], beyond: int) -> Block | None:
        """`FeedForward` if it has these matrices, otherwise a `CountedBlock`."""
        shaped = [each for each in rest if each.matrix is not None]
        channels = sum(each.channels for each in rest)
        if not shaped and not beyond:
            return None
        for block in () if beyond else _dense_or_experts(matrices(shaped), self.hidden):
            if block.parameters(self.hidden) == sum(each.count for each in shaped) and (
                block.token_flops(self.hidden) == flops(matrices(shaped))
            ):
                return block
        return CountedBlock(
            weights=matrices(shaped), other_parameters=vectors(shaped), other_flops=beyond, channels=channels
        )

    # What is outside the layers.

    def _beside(self, stack: Sequence[Any]) -> CountedBlock | None:
        """Matrices outside the layers that a token meets, such as Gemma 3n's, without the output projection's.

        Raises:
            Refused: there is attention outside the layers.
        """
        forward = self.forward
        outside = forward.work(forward.root)
        for index in self.chosen:
            outside = outside - forward.work(stack[index])
        output = self._output()
        if output is not None and forward.root is self.model:
            outside = outside - forward.work(output)
        if not outside.token and not outside.pair:
            return None
        if outside.pair:
            raise Refused("has work of pairs outside its layers: that is not understood", outside.pair)
        inside = {id(parameter) for layer in stack for parameter in layer.parameters()}
        ends = {id(parameter) for parameter in output.parameters()} if output is not None else set()
        found = [
            each
            for each in self._weights([("", forward.root)], without=inside | ends)
            if each.matrix is not None and each.matrix.used
        ]
        beyond = outside.token - flops(matrices(found))
        if beyond < 0:
            raise Refused("has work outside its layers that is not understood", outside.token)
        return CountedBlock(weights=matrices(found), other_parameters=vectors(found), other_flops=beyond)

    def _output(self) -> Any:
        """The projection to the vocabulary; None: there is none."""
        from torch import nn

        said = self.model.get_output_embeddings()
        if said is not None:
            return said
        vocabulary = visible.integer(self.config, "vocab_size")
        linear = (module for module in self.model.modules() if isinstance(module, nn.Linear))
        return next((module for module in linear if module.weight.shape[0] == vocabulary), None)

    def _whole(self, path: str, layers: Sequence[Layer]) -> Built:
        """The counts of the whole model, from its layers."""
        vocabulary = visible.integer(self.config, "vocab_size")
        total = sum(parameter.numel() for parameter in self.model.parameters())
        inside = sum(layer.parameters(self.hidden) for layer in layers)
        embedding = self.model.get_input_embeddings()
        shape = tuple(getattr(embedding, "weight", embedding).shape) if embedding is not None else ()
        if len(shape) != 2 or shape[0] < vocabulary:
            raise Refused(f"has embeddings of shape {[*shape]}, not [{vocabulary}, {self.hidden}]", None)
        output = self._output()
        if output is not None and (output.weight.shape[1] != shape[1] or output.weight.shape[0] < vocabulary):
            message = f"has an output projection of shape {[*output.weight.shape]}, not [{vocabulary}, {shape[1]}]"
            raise Refused(message, None)
        tied = output is None or output.weight is embedding.weight
        rest = total - inside - (1 if tied else 2) * vocabulary * shape[1] - self.hidden
        if rest < -self.hidden:
            message = f"has {total} parameters, of which {inside} in layers and {total - inside - rest} of embeddings"
            raise Refused(f"{message}: that is not understood", total)
        if rest > 0.001 * total:
            self._assume(f"{rest:,} parameters outside the {len(layers)} layers of {path} cost documents nothing")
        return Built(self.hidden, vocabulary, shape[1], tuple(layers), tied, rest, tuple(self.assumptions))


def _dense_or_experts(shapes: Sequence[Matrix], hidden: int) -> Iterator[FeedForward]:
    """Feed-forward blocks that may have these matrices."""
    experts = [matrix for matrix in shapes if matrix.copies > 1]
    down = next((matrix for matrix in reversed(experts or shapes) if experts or matrix.columns == hidden), None)
    if down is None or not down.used or (not experts and down.used > 1):  # in the last, a token meets layers again
        return
    latent = down.columns if experts and down.columns != hidden else 0
    dense = [m for m in shapes if m.copies == 1 and m.columns == hidden and m.rows != latent] if experts else []
    flags = (False, True)
    for gated, gate, router, bias in itertools.product(flags[::-1], flags, flags, flags):
        if gate and not dense:
            continue
        yield FeedForward(
            width=down.rows,
            gated=gated,
            bias=bias,
            num_experts=down.copies,
            experts_per_token=down.used,
            shared_width=sum(matrix.rows for matrix in dense),
            shared_gate=gate,
            router_bias=router,
            latent_size=latent,
        )


def _mixers(layer: Any) -> Iterator[Part]:
    """Path and module of a layer's attention and states that are not inside another."""

    def walk(prefix: str, parent: Any) -> Iterator[Part]:
        for name, child in parent.named_children():
            path, kind = (f"{prefix}.{name}" if prefix else name), type(child).__name__
            inner = any(True for _ in child.children())
            mixes = visible.ATTENTION.search(kind) or (_RECURRENT.search(kind) and inner)
            norm = re.search(r"norm", kind, re.IGNORECASE) and not inner
            if mixes and not norm and any(True for _ in child.parameters()):
                yield path, child
            else:
                yield from walk(path, child)

    yield from walk("", layer)


def _state_flops(part: Any) -> tuple[int, int] | None:
    """Heads of a recurrent state, and its forward FLOPs of a token: 4 or 6 of each number of the state.

    A token writes the state and reads it; under a delta rule it reads it once more. None: not known for this mixer.
    """
    name = type(part).__name__.lower()

    def size(*names: str) -> int:
        return next((v for n in names if isinstance(v := getattr(part, n, None), int) and not isinstance(v, bool)), 0)

    heads, flops = size("num_v_heads", "num_heads", "n_heads", "num_attention_heads"), 0
    if "delta" in name or (hasattr(part, "forget_gate") and hasattr(part, "b_proj")):  # the second: GLM-5-Next's
        flops = 6 * heads * size("head_k_dim", "head_dim") * size("head_v_dim", "head_dim")
        heads = size("num_k_heads") or heads  # fewer: tensor parallelism divides these
    elif "lightning" in name:
        flops = 4 * heads * size("head_dim") ** 2
    elif hasattr(part, "x_proj") or hasattr(part, "x_proj_weight"):  # Mamba's state is of channels
        heads, flops = 0, 4 * size("intermediate_size", "inner_size") * size("ssm_state_size", "state_size")
    elif hasattr(part, "A_log"):
        flops = 4 * heads * size("head_dim") * size("ssm_state_size", "state_size")
    return (heads, flops) if flops else None


def _first(part: Any, config: Any, *names: str) -> int:
    """The first of these sizes that is in the module, a module inside, or the configuration; 0: none."""
    for each in (*part.modules(), config):
        for name in names:
            value = getattr(each, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def _shapes(module: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
