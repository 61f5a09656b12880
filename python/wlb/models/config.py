"""The shape of a model: of equal layers by a few sizes, of any others layer by layer."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._choices import Passes
from wlb._core import CostModel, pass_weights
from wlb._errors import check_bool, check_integer, check_positive, check_share, error
from wlb._shown import explained
from wlb._warned import warn
from wlb.models.attention import Attention, LatentAttention
from wlb.models.blocks import Mask
from wlb.models.counted import CountedBlock
from wlb.models.encoder import ImageEncoder
from wlb.models.feed_forward import FeedForward
from wlb.models.hugging_face import Source, read
from wlb.models.layers import Layer
from wlb.models.presets import PRESETS, preset_named


@explained
@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a language model, and of the encoder of images before it where there is one.

    A decoder of equal layers, RMSNorm before attention and before a feed-forward block, is given by sizes. Any other is
    given by `layers`, with no size but the first two.

    Args:
        hidden_size: width of the residual stream.
        vocab_size: rows of the embedding.
        ffn_hidden_size: width of the feed-forward block; of one expert where there are several.
        num_layers: transformer layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; default: as many as query heads (MHA).
        head_dim: width of one head; default `hidden_size / num_heads`.
        gated_ffn: three matrices in the feed-forward block (SwiGLU), else two.
        tied_embeddings: the output projection is the embedding.
        num_experts: routed experts of a layer; 1: a dense model.
        experts_per_token: experts that a token visits.
        qkv_bias: queries, keys and values have a bias.
        output_bias: attention's output projection has a bias.
        ffn_bias: the feed-forward block has biases.
        qk_norm: queries and keys are normalised, each head with the same weights (Qwen3).
        name: for reports.
        layers: layers that are not those, in the order of the model; `stack` has them either way.
        embedding_size: width of the rows of the embedding and of the output projection, where a matrix between them and
            the layers is part of a layer (ELECTRA); default `hidden_size`.
        prediction_layers: one layer for each head of multi-token prediction: a projection of the row and of the next
            token's embedding, with three norms, that layer, and the output projection again (DeepSeek V3).
        vision: an encoder of images; what it costs is apart from what documents cost.
        other_parameters: parameters that no token of a document meets and that are in none of these: encoders of images
            or sounds that are not described, tables of positions. `-hidden_size`: the last norm has no parameters.
        assumptions: sentences about what a reader of a configuration assumed; they change nothing.

    Raises:
        WlbError: naming the first size that makes no sense, or that contradicts `layers`.
    """

    hidden_size: int
    vocab_size: int
    ffn_hidden_size: int = 0
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    gated_ffn: bool = True
    tied_embeddings: bool = False
    num_experts: int = 1
    experts_per_token: int = 1
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    name: str = "custom"
    layers: tuple[Layer, ...] | None = None
    embedding_size: int = 0
    prediction_layers: tuple[Layer, ...] = ()
    vision: ImageEncoder | None = None
    other_parameters: int = 0
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes = ("num_kv_heads", "head_dim") if self.layers is None else _OF_EQUAL_LAYERS
        optional = (*sizes, "embedding_size")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "other_parameters":
                check_integer(field.name, value, minimum=-self.hidden_size)
            elif field.type == "int":
                check_integer(field.name, value, minimum=0 if field.name in optional else 1)
            elif field.type == "bool":
                check_bool(field.name, value)
        if not isinstance(self.name, str):
            raise error("name", f"= {self.name!r}: must be text", value=self.name)
        _check_layers("prediction_layers", self.prediction_layers)
        if self.layers is not None:
            self._check_unlike()
            return
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if not self.head_dim:
            if self.hidden_size % self.num_heads:
                message = f"= {self.num_heads}: does not divide hidden_size = {self.hidden_size}; head_dim is needed"
                raise error("num_heads", message, value=self.num_heads)
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        _ = self.stack  # checks the sizes of its blocks

    def _check_unlike(self) -> None:
        """Checks `layers`, and that no size says anything beside them."""
        layers = self.layers or ()
        _check_layers("layers", layers)
        if not layers:
            raise error("layers", "= (): must not be empty", value=layers)
        if self.num_layers not in (0, len(layers)):
            message = f"= {self.num_layers}: there are {len(layers)} layers"
            raise error("num_layers", message, value=self.num_layers)
        object.__setattr__(self, "num_layers", len(layers))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _OF_EQUAL_LAYERS and field.name != "num_layers" and value != field.default:
                raise error(field.name, f"= {value!r}: is of equal layers, and layers are given", value=value)

    @cached_property
    def stack(self) -> tuple[Layer, ...]:
        """Every layer, in the order of the model."""
        if self.layers is not None:
            return self.layers
        attention = Attention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            qkv_bias=self.qkv_bias,
            output_bias=self.output_bias,
            qk_norm="head" if self.qk_norm else "none",
        )
        feed_forward = FeedForward(
            width=self.ffn_hidden_size,
            gated=self.gated_ffn,
            bias=self.ffn_bias,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
        )
        return (Layer((attention, feed_forward)),) * self.num_layers

    @cached_property
    def kinds(self) -> dict[Layer, int]:
        """The layers that differ, and how many there are of each, in the order in which they first come."""
        return dict(Counter(self.stack))

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """A model by name in any case, see `presets`.

        ========================  ==========================================================================
        ``llama2-7b`` ...         As published: ``llama2-7b``, ``-13b``, ``-70b``; ``llama3-8b``, ``-70b``, ``-405b``.
        ``wlb-llm-7b``            WLB-LLM (OSDI'25) section 7: the architecture of LLaMA2-7B.
        ``wlb-llm-70b``           Its 70B is taken to be LLaMA2-70B.
        ``wlb-llm-550m``, -30b    The paper says only that they keep the architecture and scale depth and width. Ours
                                  keep heads of 128, MHA, a feed-forward width of 8/3, and depths that divide into the
                                  paper's 4 pipeline stages, also interleaved twice: 16 x 1536 is 551 M parameters,
                                  64 x 6144 is 29.4 G (48 heads divide by its TP of 8; LLaMA-30B's 52 do not).
        ========================  ==========================================================================

        Raises:
            WlbError: there is no such name.
        """
        found = preset_named(name)
        if found is None:
            hub = "; a model of the hub or a folder is read by ModelConfig.from_hugging_face" if "/" in name else ""
            raise error("name", f"{name!r}: must be one of {', '.join(PRESETS)}{hub}", value=name)
        return cls(name=found, **PRESETS[found])

    @classmethod
    def from_hugging_face(cls, config: Source, *, multi_token_prediction: bool = False) -> ModelConfig:
        """The shape that a Hugging Face config describes; of which families, see docs/models.md.

        Whatever would change FLOPs or parameters and is not known here is refused by name rather than priced wrongly.

        Args:
            config: a transformers config; a dict; a path of a `config.json` or of its folder; or a name on the hub,
                such as "meta-llama/Llama-3.1-8B", whose file comes from the hub's cache or is downloaded. A type that
                no family here describes is built by transformers on the meta device and counted module by module;
                `assumptions` then says what was assumed.
            multi_token_prediction: the heads of multi-token prediction that the config counts are trained as well.

        Raises:
            WlbError: the file cannot be read or had; a key is missing, of the wrong type or contradicts another; or a
                model type or feature is not known.
        """
        check_bool("multi_token_prediction", multi_token_prediction)
        return cls(**_by_sizes(read(config, multi_token_prediction=multi_token_prediction)))

    @cached_property
    def attention(self) -> Attention:
        """The attention of the layers that have any, where they differ in masks alone; its mask is the first one's.

        Raises:
            WlbError: there is none, or heads differ, or attention is latent.
        """
        blocks = [block for layer in self.stack for block in layer.blocks if block.pairs()]
        alike = {dataclasses.replace(block, mask=Mask()) if isinstance(block, Attention) else block for block in blocks}
        if len(alike) != 1 or not isinstance(blocks[0], Attention):
            kinds = sorted({type(block).__name__ for layer in self.kinds for block in layer.blocks})
            message = f"of {self.name} are of {', '.join(kinds)}: heads that all layers have are needed"
            raise error("layers", message, value=self.name)
        return blocks[0]

    @cached_property
    def kernel_heads(self) -> tuple[int, int, int]:
        """Query heads, key heads and their width, which a kernel model for this model has: the first attention's.

        Of latent attention the mean width of a head's key and value, rounded up.

        Raises:
            WlbError: no layer has attention.
        """
        for block in (block for layer in self.stack for block in layer.blocks):
            if isinstance(block, Attention) or (isinstance(block, CountedBlock) and block.pairs()):
                return block.num_heads, block.num_kv_heads, block.head_dim
            if isinstance(block, LatentAttention):
                width = block.key_dim + block.rope_dim + block.value_dim
                return block.num_heads, block.num_heads, -(-width // 2)
        raise error("layers", f"of {self.name} have no attention: all tokens cost the same", value=self.name)

    @cached_property
    def feed_forward(self) -> FeedForward:
        """The feed-forward block of all layers.

        Raises:
            WlbError: layers are not all of attention and that block.
        """
        blocks = {block for layer in self.kinds for block in layer.blocks if isinstance(block, FeedForward)}
        ours = Attention, FeedForward
        if len(blocks) != 1 or any([type(b) for b in layer.blocks] != [*ours] for layer in self.kinds):
            message = f"of {self.name} differ: attention and the same feed-forward block in each are needed"
            raise error("layers", message, value=self.name)
        return blocks.pop()

    def _one_layer(self, what: str) -> Layer:
        if self.layers is not None:
            raise error("layers", f"differ: {what} is of a model of equal layers", value=self.name)
        return self.stack[0]

    @property
    def num_parameters(self) -> int:
        """All parameters, exactly: embedding, layers, last norm, output projection unless tied; encoder of images."""
        encoder = self.vision.num_parameters if self.vision else 0
        return self._parameters(active=False) + encoder + self.other_parameters

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token of a document meets: those of `experts_per_token` experts only, and no encoder."""
        return self._parameters(active=True)

    def _parameters(self, *, active: bool) -> int:
        hidden = self.hidden_size
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * (self.embedding_size or hidden)
        layers = sum(count * kind.parameters(hidden, active=active) for kind, count in self.kinds.items())
        # Each head: norms of the row, of the embedding and of what goes to the output projection; and a matrix.
        heads = sum(layer.parameters(hidden, active=active) + (3 + 2 * hidden) * hidden for layer in self._heads)
        return embeddings + layers + hidden + heads

    @property
    def _heads(self) -> tuple[Layer, ...]:
        return self.prediction_layers

    def shape(self) -> dict[str, Any]:
        """Arguments of `wlb.CostModel.from_flops` and `wlb.torch.model_flops`, of a model of equal layers.

        Raises:
            WlbError: the layers differ; `flops` and `cost_model` know them.
        """
        self._one_layer("shape()")
        names = ("hidden_size", "ffn_hidden_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size", "head_dim")
        return {name: getattr(self, name) for name in (*names, "gated_ffn", "experts_per_token")}

    @cached_property
    def pair_flops(self) -> dict[Mask, int]:
        """Forward FLOPs of each (query, key) pair, over all layers, by mask."""
        total: Counter[Mask] = Counter()
        for layer in (*self.stack, *self._heads):
            total.update(layer.pairs())
        return dict(total)

    @cached_property
    def residual_width(self) -> int:
        """Numbers of a token that a layer hands to the next: of all residual streams, where there are several."""
        streams = [block.streams for layer in self.kinds for block in layer.of_kind(CountedBlock)]
        return max(streams, default=1) * self.hidden_size

    @cached_property
    def token_flops(self) -> int:
        """Forward FLOPs of each token beside its pairs, over all layers and output projections."""
        hidden = self.hidden_size
        layers = sum(count * kind.token_flops(hidden) for kind, count in self.kinds.items())
        heads = sum(layer.token_flops(hidden) + 4 * hidden * hidden for layer in self._heads)
        return layers + heads + 2 * (1 + len(self._heads)) * (self.embedding_size or hidden) * self.vocab_size

    def cost_model(
        self,
        *,
        attention_efficiency: float = 0.55,
        flops_per_second: float = 1.0,
        passes: Passes = "forward_backward",
        recompute: bool | float = False,
        causal: bool = True,
    ) -> CostModel:
        """Cost of documents from FLOPs, with a term for all pairs, for pairs of each window and chunk, and for tokens.

        For equal layers the same as `wlb.CostModel.from_flops`. Routers, convolutions and states are counted,
        norms and biases are not. An encoder of images is not counted: its images are not documents.

        Args:
            attention_efficiency: FLOP rate of attention relative to the matrix multiplications'. A percentage, above
                10, is warned of.
            flops_per_second: rate of the matrix multiplications; 1: the unit is one of their FLOPs, else seconds.
            passes: what is counted.
            recompute: the backward runs the forward again; or the share of the layers of which it does, from 0 to 1.
            causal: a token attends to itself and those before it, else to its whole document.

        Raises:
            WlbError: for a rate that is not positive; or without `causal`, for layers with windows, chunks or an
                indexer.
        """
        check_positive("attention_efficiency", attention_efficiency)
        if attention_efficiency > 10:
            warn(
                f"attention_efficiency = {attention_efficiency:g} is a ratio of two rates, such as 0.55, not a"
                " percentage. It is above 10 only where a slow network holds up everything but attention."
            )
        check_positive("flops_per_second", flops_per_second)
        if not isinstance(recompute, bool):
            check_share("recompute", recompute)
        once, again = (pass_weights(passes, recompute=each) for each in (False, True))
        pair_weight, token_weight = (a + float(recompute) * (b - a) for a, b in zip(once, again, strict=True))
        check_bool("causal", causal)
        by_kind = {kind: {m.size: f for m, f in self.pair_flops.items() if m.kind == kind} for kind in _LOCAL}
        if not causal and any(by_kind.values()):
            found = ", ".join(f"{kind} {size}" for kind, sizes in by_kind.items() for size in sizes)
            raise error("causal", f"= False: {self.name} has layers with {found}, which are causal", value=causal)

        def attention(flops: int) -> float:
            return flops * pair_weight / attention_efficiency / flops_per_second

        local = {
            f"{kind}s": {size: attention(flops) for size, flops in sizes.items()} for kind, sizes in by_kind.items()
        }
        return CostModel(
            attention=attention(self.pair_flops.get(Mask(), 0)),
            linear=self.token_flops * token_weight / flops_per_second,
            causal=causal,
            unit="flops" if flops_per_second == 1 else "seconds",
            windows=local["windows"],
            chunks=local["chunks"],
        )

    def flops(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """Model FLOPs of training each document, as MFU counts them: three times those of its forward.

        Of the language model; `ImageEncoder.flops` of `vision` has those of images.

        Args:
            lengths: int[n] tokens.

        Returns:
            float64[n].
        """
        return 3 * self.cost_model(attention_efficiency=1.0, passes="forward").cost(lengths)


_OF_EQUAL_LAYERS = (
    "ffn_hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "gated_ffn",
    "num_experts",
    "experts_per_token",
    "qkv_bias",
    "output_bias",
    "ffn_bias",
    "qk_norm",
)

_LOCAL = ("window", "chunk")


def _check_layers(name: str, layers: object) -> None:
    if not isinstance(layers, tuple):
        raise error(name, f"= {layers!r}: must be a tuple of layers", value=layers)
    for index, layer in enumerate(layers):
        if not isinstance(layer, Layer):
            raise error(name, f"= {layer!r}: must be a layer", index=index, value=layer)
        kinds = {mask.kind for mask in layer.pairs()} - {"full", *_LOCAL}
        if kinds:
            raise error(name, f"has masks {sorted(kinds)}: those of a decoder are causal", index=index, value=layer)


def _by_sizes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments that give the same model by sizes, where its layers are equal and sizes can say what they are."""
    layers: tuple[Layer, ...] = arguments["layers"]
    first = layers[0]
    if any(layer != first for layer in layers[1:]) or len(first.sublayers) != 2:
        return arguments
    attention, feed_forward = first.sublayers
    if not isinstance(attention, Attention) or not isinstance(feed_forward, FeedForward):
        return arguments
    by_sizes = {name: value for name, value in arguments.items() if name != "layers"} | {
        "num_layers": len(layers),
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "qkv_bias": attention.qkv_bias,
        "output_bias": attention.output_bias,
        "qk_norm": attention.qk_norm == "head",
        "ffn_hidden_size": feed_forward.width,
        "gated_ffn": feed_forward.gated,
        "ffn_bias": feed_forward.bias,
        "num_experts": feed_forward.num_experts,
        "experts_per_token": feed_forward.experts_per_token,
    }
    return by_sizes if ModelConfig(**by_sizes).stack == layers else arguments
