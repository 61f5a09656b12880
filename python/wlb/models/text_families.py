"""Language models by Hugging Face model type: the meaning of each key, and the properties that no key gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from wlb.models.attention import Attention, BlockIndexer, Indexer, LatentAttention
from wlb.models.blocks import Block, Mask
from wlb.models.feed_forward import FeedForward
from wlb.models.keys import LEGACY, Keys, Refused
from wlb.models.layers import Layer
from wlb.models.recurrent import GatedDeltaNet, KimiDeltaAttention, LightningAttention, Mamba1, Mamba2
from wlb.models.streams import HyperConnection, NGramEmbedding

FULL, LINEAR, SLIDING, CHUNKED = "full_attention", "linear_attention", "sliding_attention", "chunked_attention"
INDEXED = "indexed_attention"


@dataclass(frozen=True)
class Text:
    """A language model."""

    layers: tuple[Layer, ...]
    tied: bool = False  # the default where no key says it
    prediction: Layer | None = None  # the layer of a head that predicts a token further on


@dataclass(frozen=True)
class Heads:
    """Attention of a family. A text value names the key that holds it."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    qk_norm: Literal["none", "head", "all"] = "none"
    gated: bool = False
    sinks: bool = False
    floors: bool = False  # a width that heads do not divide is rounded down

    def block(self, keys: Keys, kind: str) -> Attention:
        """Attention block of one layer."""
        hidden, heads = keys.integer("hidden_size"), keys.positive("num_attention_heads")
        head_dim = keys.integer("head_dim", "attention_head_dim", default=0)
        if not head_dim:
            head_dim, rest = divmod(hidden, heads)
            if rest and not self.floors:
                message = f"num_heads = {heads}: does not divide hidden_size = {hidden}; head_dim is needed"
                raise Refused(f"has {message}", heads)
        return Attention(
            num_heads=heads,
            num_kv_heads=keys.integer("num_key_value_heads", default=heads),
            head_dim=head_dim,
            mask=_mask(keys, kind),
            qkv_bias=_flag(keys, self.qkv_bias),
            output_bias=_flag(keys, self.output_bias),
            qk_norm=self.qk_norm,
            gated=self.gated,
            sinks=self.sinks,
        )


_BIASED = Heads(qkv_bias="attention_bias", output_bias="attention_bias")


def _flag(keys: Keys, value: bool | str) -> bool:
    return keys.flag(value) if isinstance(value, str) else value


def _mask(keys: Keys, kind: str) -> Mask:
    if kind == FULL:
        return Mask()
    if kind == SLIDING:
        window = keys.window()
        return Mask("window", window) if window else Mask()
    if kind == CHUNKED:
        chunk = keys.positive("attention_chunk_size")
        context = keys.integer("max_position_embeddings", default=0)
        return Mask("chunk", chunk) if not context or chunk < context else Mask()
    raise Refused(f"has layer_types {kind!r}: what that costs is not known to wlb", kind)


def _count(keys: Keys) -> int:
    count = keys.integer("num_hidden_layers")
    if count < 1:
        raise Refused(f"has num_layers = {count}: must be at least 1", count)
    return count


# Feed-forward blocks.


def _dense(keys: Keys, *, bias: bool | str = False) -> FeedForward:
    return FeedForward(width=keys.integer("intermediate_size"), bias=_flag(keys, bias))


def _experts(keys: Keys, *, width: int, **more: Any) -> FeedForward:
    experts = keys.integer("num_local_experts", "num_experts", "n_routed_experts", "num_routed_experts", default=1)
    visited = keys.integer("num_experts_per_tok", "num_experts_per_token", default=1 if experts == 1 else None)
    return FeedForward(width=width, num_experts=experts, experts_per_token=visited, **more)


def _mixtral(keys: Keys, **more: Any) -> FeedForward:
    """Experts of width `intermediate_size`, as in Mixtral, unless another key gives the width of experts.

    Without experts: a dense block.
    """
    return _experts(keys, width=keys.integer("moe_intermediate_size", "intermediate_size"), **more)


def _qwen_feed_forward(keys: Keys, index: int) -> FeedForward:
    """Experts in every `decoder_sparse_step`-th layer that is not listed as dense; perhaps a gated shared one."""
    step = keys.integer("decoder_sparse_step", default=1)
    if index in keys.integers("mlp_only_layers", ()) or not step or (index + 1) % step:
        return _dense(keys)
    shared = keys.integer("shared_expert_intermediate_size", default=0)
    width = keys.integer("moe_intermediate_size")
    return _experts(keys, width=width, shared_width=shared, shared_gate=bool(shared))


def _deepseek_feed_forward(keys: Keys) -> Callable[[int], FeedForward]:
    """Leading dense layers, then experts of which some are shared."""
    leading = keys.count("first_k_dense_replace", default=0)
    count = _count(keys)
    kinds = keys.per_layer(["mlp_layer_types"], count, lambda index: "dense" if index < leading else "sparse")
    keys.only("moe_layer_freq", 1)

    def block(index: int) -> FeedForward:
        if kinds[index] == "dense":
            return _dense(keys)
        width = keys.integer("moe_intermediate_size")
        shared = keys.integer("n_shared_experts", "num_shared_experts", default=0)
        return _experts(keys, width=width, shared_width=shared * width)

    return block


# Families. Each reads a config into layers.

Family = Callable[[Keys], Text]


def _decoder(
    heads: Heads = _BIASED,
    *,
    feed_forward: Callable[[Keys, int], FeedForward] = lambda keys, index: _mixtral(keys),
    kinds: Callable[[Keys, int], list[str]] | None = None,
    norms: int = 2,
    parallel: bool = False,
    tied: bool = False,
    always: tuple[str, ...] = (),
) -> Family:
    """Attention, then a feed-forward block; `kinds` gives those of the layers, full attention where there is none.

    `always` names flags that restate what the family always has.
    """

    def family(keys: Keys) -> Text:
        count = _count(keys)
        for name in always:
            keys.only(name, True)
        of_layers = kinds(keys, count) if kinds else [FULL] * count
        layers = []
        for index, kind in enumerate(of_layers):
            blocks: tuple[Block, ...] = (heads.block(keys, kind), feed_forward(keys, index))
            layers.append(Layer((blocks,) if parallel else blocks, norms))
        return Text(tuple(layers), tied)

    return family


def _all_sliding(keys: Keys, count: int) -> list[str]:
    return [SLIDING] * count


def _every(period: int, key: str = "sliding_window_pattern", rest: str = SLIDING) -> Callable[[Keys, int], list[str]]:
    """Full attention in every `period`-th layer, unless a list says which; a key may give another period."""

    def kinds(keys: Keys, count: int) -> list[str]:
        if "layer_types" in keys:
            keys.pass_over(key)  # what the list was made from
            return keys.per_layer(["layer_types"], count, lambda index: FULL)
        each = keys.positive(key, default=period)
        return [rest if (index + 1) % each else FULL for index in range(count)]

    return kinds


def _from_layer_on(keys: Keys, count: int) -> list[str]:
    """Qwen 2 and 3: layers from `max_window_layers` on have the window, where it is used."""
    used = keys.flag("use_sliding_window")
    first = keys.integer("max_window_layers", default=count) if used else count
    return keys.per_layer(["layer_types"], count, lambda index: SLIDING if index >= first else FULL)


def _qwen2_moe_kinds(keys: Keys, count: int) -> list[str]:
    used, first = keys.flag("use_sliding_window"), keys.integer("max_window_layers", default=28)
    return keys.per_layer(
        ["layer_types"], count, lambda index: SLIDING if used and index < first and not index % 2 else FULL
    )


def _smollm3_kinds(keys: Keys, count: int) -> list[str]:
    """Layers without rotation have the window, where it is used."""
    used = keys.flag("use_sliding_window")
    if used and "layer_types" not in keys:
        every = keys.positive("no_rope_layer_interval", default=4)
        rotated = keys.integers("no_rope_layers", [int((index + 1) % every != 0) for index in range(count)])
        return [FULL if rotates else SLIDING for rotates in rotated]
    return keys.per_layer(["layer_types"], count, lambda index: FULL)


def _deepseek(keys: Keys) -> Text:
    """Latent attention, with an indexer where there is one."""
    indexer = None
    if "index_topk" in keys:
        sizes = {"num_heads": "index_n_heads", "head_dim": "index_head_dim", "top_k": "index_topk"}
        indexer = Indexer(**{ours: keys.integer(theirs) for ours, theirs in sizes.items()})
    count = _count(keys)
    expected = FULL if indexer is None else INDEXED
    for kind in keys.per_layer(["layer_types"], count, lambda index: expected):
        if kind != expected:
            raise Refused(f"has layer_types {kind!r}: what that costs is not known to wlb", kind)
    attention, feed_forward = _latent(keys, indexer), _deepseek_feed_forward(keys)
    layers = tuple(Layer((attention, feed_forward(index))) for index in range(count))
    return Text(layers, prediction=layers[-1])


def _latent(keys: Keys, indexer: Indexer | None = None) -> LatentAttention:
    return LatentAttention(
        num_heads=keys.positive("num_attention_heads"),
        kv_rank=keys.integer("kv_lora_rank"),
        key_dim=keys.integer("qk_nope_head_dim"),
        rope_dim=keys.integer("qk_rope_head_dim"),
        value_dim=keys.integer("v_head_dim"),
        query_rank=keys.integer("q_lora_rank", default=0),
        bias=keys.flag("attention_bias"),
        indexer=indexer,
    )


def _kimi_linear(keys: Keys) -> Text:
    """Three layers of delta attention, then one of latent attention; leading dense layers, then experts."""
    count = _count(keys)

    def otherwise(index: int) -> str:
        return FULL if index and not index % 4 else LINEAR

    sizes = keys
    if "linear_attn_config" in keys:  # as its authors wrote it, layers counted from 1
        sizes = keys.section("linear_attn_config")
        keys.pass_over("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
        listed = {*sizes.integers("full_attn_layers", ())}

        def otherwise(index: int) -> str:
            return FULL if index + 1 in listed else LINEAR

    kinds = keys.per_layer(["layer_types"], count, otherwise)
    delta = KimiDeltaAttention(
        num_heads=sizes.integer("num_heads" if sizes is not keys else "linear_num_heads"),
        head_dim=sizes.integer("head_dim" if sizes is not keys else "linear_head_dim"),
        conv_kernel=sizes.integer("short_conv_kernel_size", "linear_conv_kernel_dim"),
    )
    latent, feed_forward = _latent(keys), _deepseek_feed_forward(keys)
    layers = tuple(Layer((_by_kind(kind, latent, delta), feed_forward(index))) for index, kind in enumerate(kinds))
    return Text(layers, prediction=layers[-1])


def _by_kind(kind: str, full: Block, linear: Block) -> Block:
    if kind not in (FULL, LINEAR):
        raise Refused(f"has layer_types {kind!r}: what that costs is not known to wlb", kind)
    return full if kind == FULL else linear


def _qwen_hybrid(feed_forward: Callable[[Keys, int], FeedForward]) -> Family:
    """Three layers of gated DeltaNet, then one of gated attention."""
    heads = Heads("attention_bias", "attention_bias", qk_norm="head", gated=True)
    kinds = _every(4, "full_attention_interval", LINEAR)

    def family(keys: Keys) -> Text:
        delta = _delta(keys)
        attention = heads.block(keys, FULL)
        keys.only("attn_output_gate", True)
        of_layers = kinds(keys, _count(keys))
        layers = tuple(
            Layer((_by_kind(kind, attention, delta), feed_forward(keys, index))) for index, kind in enumerate(of_layers)
        )
        return Text(layers, prediction=Layer((attention, feed_forward(keys, len(layers) - 1))))

    return family


def _delta(keys: Keys) -> GatedDeltaNet:
    return GatedDeltaNet(
        num_key_heads=keys.integer("linear_num_key_heads"),
        num_value_heads=keys.integer("linear_num_value_heads"),
        key_dim=keys.integer("linear_key_head_dim"),
        value_dim=keys.integer("linear_value_head_dim"),
        conv_kernel=keys.integer("linear_conv_kernel_dim"),
    )


def _qwen4_exp(keys: Keys) -> Text:
    """Gated DeltaNet, then attention to blocks of keys; several residual streams; n-grams' embeddings."""
    sizes = {"num_heads": "n_heads", "head_dim": "head_dim", "budget": "budget", "block": "compress_ratio"}
    indexer = BlockIndexer(**{ours: keys.positive(f"indexer_{theirs}") for ours, theirs in sizes.items()})
    keys.only("indexer_kv_heads", 1)
    if indexer.budget % indexer.block:
        message = f"has indexer_budget {indexer.budget}, which indexer_compress_ratio {indexer.block} does not divide"
        raise Refused(message, indexer.budget)
    heads = Heads("attention_bias", "attention_bias", qk_norm="head", gated=True)
    attention, delta = dataclasses.replace(heads.block(keys, FULL), indexer=indexer), _delta(keys)
    count, hidden = _count(keys), keys.integer("hidden_size")
    kinds = [FULL if kind == INDEXED else kind for kind in _every(4, "full_attention_interval", LINEAR)(keys, count)]
    mix = HyperConnection(streams=keys.positive("hc_count"), rank=keys.positive("hc_lowrank"))
    embedded = sorted({*keys.integers("ple_layer_ids", ())})
    for number in embedded:
        if not 1 <= number <= count or kinds[number - 1] != LINEAR:
            raise Refused(f"has ple_layer_ids {number}: there is no layer of linear attention of that number", number)
    layers = []
    for index, kind in enumerate(kinds):
        before: tuple[Block, ...] = (mix,)
        if index + 1 in embedded:
            before = (_n_grams(keys, embedded.index(index + 1), mix.streams * hidden), mix)
        after = (dataclasses.replace(mix, injects=False),) if index + 1 == count else ()
        mixer, feed_forward = _by_kind(kind, attention, delta), _qwen_feed_forward(keys, index)
        layers.append(Layer(((*before, mixer), (mix, feed_forward, *after)), norms=0))
    return Text(tuple(layers))


def _n_grams(keys: Keys, which: int, width: int) -> NGramEmbedding:
    """The embeddings of n-grams in the `which`-th of the layers that have them.

    Each head of each n-gram has a table of its own, with a prime number of rows that no other table has.
    """
    embedding = keys.integer("ple_embed_dim", default=keys.integer("hidden_size"))
    heads = (keys.positive("ngram_size", default=3) - 1) * keys.positive("heads_per_ngram", default=8)
    if not heads or embedding % heads:
        raise Refused(f"has ple_embed_dim {embedding}, which {heads} heads of n-grams do not divide", embedding)
    sizes = _primes(keys.positive("ngram_vocab_size_base", default=20_000_000))
    rows = sum([next(sizes) for _ in range((which + 1) * heads)][which * heads :])
    multiple = keys.positive("make_ngram_vocab_size_divisible_by", default=128)
    return NGramEmbedding(
        table=-(-rows // multiple) * multiple,
        row=embedding // heads,
        embedding=embedding,
        width=width,
        conv_kernel=keys.positive("ple_conv_kernel_size", default=4),
    )


def _primes(least: int) -> Iterator[int]:
    """Primes from `least` on."""
    number = max(least, 2)
    while True:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number
        number += 1


def _minimax(keys: Keys) -> Text:
    """Lightning attention and attention in turn."""
    count = _count(keys)
    keys.pass_over("block_size")  # of the kernel of lightning attention
    if "attn_type_list" in keys:  # 0: lightning attention
        full = keys.integers("attn_type_list", ())
        kinds = keys.per_layer(["layer_types"], count, lambda index: FULL if full[index] else LINEAR)
    else:
        kinds = keys.per_layer(["layer_types"], count, lambda index: LINEAR if index % 2 else FULL)
    attention = Heads().block(keys, SLIDING)
    lightning = LightningAttention(num_heads=attention.num_heads, head_dim=attention.head_dim)
    return Text(tuple(Layer((_by_kind(kind, attention, lightning), _mixtral(keys))) for kind in kinds))


def _minimax_m2(keys: Keys) -> Text:
    """Full attention in every layer, whose list of kinds says 1 for it; all heads are normalised together."""
    count = _count(keys)
    kinds = keys.integers("attn_type_list", [1] * count)
    if len(kinds) != count:
        raise Refused(f"has {len(kinds)} attn_type_list and {count} layers", kinds)
    if any(kind != 1 for kind in kinds):
        raise Refused("has attn_type_list with other kinds than 1: what that costs is not known to wlb", kinds)
    keys.only("use_qk_norm", True)
    layer = Layer((Heads(qk_norm="all").block(keys, FULL), _mixtral(keys)))
    return Text((layer,) * count, prediction=layer)


def _llama4(keys: Keys) -> Text:
    """Chunked attention in layers that rotate, full attention in the others; experts in some layers, one shared."""
    count = _count(keys)
    interval = keys.positive("no_rope_layer_interval", default=4)
    # An empty list stands for the rule.
    rotated = keys.integers("no_rope_layers", ()) or [int((index + 1) % interval != 0) for index in range(count)]
    kinds = keys.per_layer(["layer_types"], count, lambda index: CHUNKED if rotated[index] else FULL)
    step = keys.positive("interleave_moe_layer_step", default=1)
    sparse = {*keys.integers("moe_layers", range(step - 1, count, step))}
    width = keys.integer("intermediate_size")
    keys.pass_over("use_qk_norm")  # it has no weights
    experts = _experts(keys, width=width, shared_width=width)
    layers = []
    for index, kind in enumerate(kinds):
        feed_forward = experts if index in sparse else FeedForward(width=keys.integer("intermediate_size_mlp"))
        layers.append(Layer((_BIASED.block(keys, kind), feed_forward)))
    return Text(tuple(layers))


def _glm4_moe(keys: Keys) -> Text:
    feed_forward = _deepseek_feed_forward(keys)
    norm: Literal["none", "head"] = "head" if keys.flag("use_qk_norm") else "none"
    attention = Heads(qkv_bias="attention_bias", qk_norm=norm, floors=True).block(keys, FULL)
    layers = tuple(Layer((attention, feed_forward(index))) for index in range(_count(keys)))
    return Text(layers, prediction=layers[-1])


# State spaces.


def _mamba2_block(keys: Keys, *, bias: bool = False, norm: bool = True, inner: int = 0) -> Mamba2:
    """Mamba-2 block of Bamba, Granite and Falcon models, which use the same keys."""
    heads = keys.positive("mamba_n_heads")
    inner = inner or keys.integer("mamba_expand", default=2) * keys.integer("hidden_size")
    return Mamba2(
        num_heads=heads,
        head_dim=inner // heads,
        state_size=keys.integer("mamba_d_state"),
        num_groups=keys.integer("mamba_n_groups", default=1),
        conv_kernel=keys.integer("mamba_d_conv", default=4),
        bias=bias,
        conv_bias=keys.flag("mamba_conv_bias", default=True),
        norm=norm,
    )


def _granite_hybrid(keys: Keys) -> Text:
    """Mamba-2 and attention; experts beside a shared block, or that block alone."""
    kinds = keys.per_layer(["layer_types", "layers_block_type"], _count(keys), lambda index: LINEAR)
    mamba = _mamba2_block(keys, bias=keys.flag("mamba_proj_bias"))
    shared = keys.integer("shared_intermediate_size")
    if keys.integer("num_local_experts"):
        feed_forward = _experts(keys, width=keys.integer("intermediate_size"), shared_width=shared)
    else:
        feed_forward = FeedForward(width=shared)
    return Text(
        tuple(
            Layer((_by_kind(kind, _BIASED.block(keys, FULL), mamba) if kind == FULL else mamba, feed_forward))
            for kind in kinds
        )
    )


def _bamba(keys: Keys) -> Text:
    """Mamba-2, and attention in listed layers."""
    listed = {*keys.integers("attn_layer_indices", ())}
    mamba = _mamba2_block(keys, bias=keys.flag("mamba_proj_bias"))
    attention, feed_forward = _BIASED.block(keys, FULL), _dense(keys, bias="mlp_bias")
    return Text(tuple(Layer((attention if index in listed else mamba, feed_forward)) for index in range(_count(keys))))


def _falcon_h1(keys: Keys) -> Text:
    """Mamba-2 and attention side by side in every layer."""
    if keys.flag("mamba_proj_bias") != keys.flag("projectors_bias"):
        raise Refused("has mamba_proj_bias and projectors_bias that differ: that is not known to wlb", None)
    mamba = _mamba2_block(
        keys,
        bias=keys.flag("mamba_proj_bias"),
        norm=keys.flag("mamba_rms_norm"),
        inner=keys.integer("mamba_d_ssm", default=0),
    )
    layer = Layer(((_BIASED.block(keys, FULL), mamba), _dense(keys, bias="mlp_bias")))
    return Text((layer,) * _count(keys))


def _nemotron_h(keys: Keys) -> Text:
    """One block in a layer: Mamba-2, attention, a feed-forward block or experts."""
    letters = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
    if "hybrid_override_pattern" in keys and "layers_block_type" not in keys:
        kinds = [letters.get(letter, letter) for letter in keys.read(str, "hybrid_override_pattern")]
    else:
        name = next((name for name in ("layers_block_type", "layer_types") if name in keys), "layers_block_type")
        kinds = keys.per_layer([name], len(keys.read(list, name)), lambda index: FULL)
    # num_hidden_layers, if given, is the length of this list.
    if not kinds or keys.integer("num_hidden_layers", default=len(kinds)) != len(kinds):
        raise Refused(f"has num_hidden_layers that are not its {len(kinds)} blocks", len(kinds))
    bias = keys.flag("use_bias")
    mamba = Mamba2(
        num_heads=keys.integer("mamba_num_heads"),
        head_dim=keys.integer("mamba_head_dim"),
        state_size=keys.integer("ssm_state_size"),
        num_groups=keys.integer("n_groups"),
        conv_kernel=keys.integer("conv_kernel", default=4),
        bias=bias,
        conv_bias=keys.flag("use_conv_bias", default=True),
    )
    mlp_bias = keys.flag("mlp_bias")

    def block(kind: str) -> Block:
        if kind == "mlp":
            return FeedForward(width=keys.integer("intermediate_size"), gated=False, bias=mlp_bias)
        if kind == "moe":
            if mlp_bias:
                raise Refused("has mlp_bias: what that is of experts is not known to wlb", True)
            return _experts(
                keys,
                width=keys.integer("moe_intermediate_size"),
                gated=False,
                shared_width=keys.integer("moe_shared_expert_intermediate_size"),
                latent_size=keys.integer("moe_latent_size", default=0),
            )
        return _by_kind(kind, Heads().block(keys, FULL) if kind == FULL else mamba, mamba)

    # Files without experts have these keys, too.
    keys.pass_over("n_routed_experts", "n_shared_experts", "moe_latent_size", "moe_intermediate_size")
    keys.pass_over("moe_shared_expert_intermediate_size", "num_experts_per_tok", "mlp_bias", "layer_types")
    heads = [letters.get(letter, letter) for letter in keys.read(str, "mtp_hybrid_override_pattern", default="")]
    heads = heads or [LEGACY.get(str(kind), str(kind)) for kind in keys.read(list, "mtp_layers_block_type", default=[])]
    prediction = Layer(tuple(block(kind) for kind in heads), norms=len(heads)) if heads else None
    return Text(tuple(Layer((block(kind),), norms=1) for kind in kinds), prediction=prediction)


def _jamba(keys: Keys) -> Text:
    """Mamba, attention in every n-th layer; experts in every m-th."""
    hidden = keys.integer("hidden_size")
    mamba = Mamba1(
        inner=keys.integer("mamba_expand", default=2) * hidden,
        state_size=keys.integer("mamba_d_state"),
        conv_kernel=keys.integer("mamba_d_conv", default=4),
        step_rank=_rank(keys, "mamba_dt_rank", hidden),
        bias=keys.flag("mamba_proj_bias"),
        conv_bias=keys.flag("mamba_conv_bias", default=True),
        norms=True,
    )
    count = _count(keys)
    every, first = keys.positive("attn_layer_period", default=8), keys.integer("attn_layer_offset", default=4)
    experts_every, first_experts = (
        keys.positive("expert_layer_period", default=2),
        keys.integer("expert_layer_offset", default=1),
    )
    keys.pass_over("layers_block_type")  # follows from these
    layers = []
    for index, kind in enumerate(
        keys.per_layer(["layer_types"], count, lambda index: FULL if index % every == first else LINEAR)
    ):
        mixer = _by_kind(kind, Heads().block(keys, FULL), mamba)
        sparse = index % experts_every == first_experts
        layers.append(Layer((mixer, _mixtral(keys) if sparse else _dense(keys))))
    return Text(tuple(layers))


def _rank(keys: Keys, name: str, hidden: int) -> int:
    try:
        return keys.integer(name)
    except Refused as refused:
        if refused.value == "auto":
            return -(-hidden // 16)
        raise


def _mamba(keys: Keys) -> Text:
    hidden = keys.integer("hidden_size")
    keys.pass_over("intermediate_size")  # follows from these
    block = Mamba1(
        inner=keys.integer("expand", default=2) * hidden,
        state_size=keys.integer("state_size"),
        conv_kernel=keys.integer("conv_kernel", default=4),
        step_rank=_rank(keys, "time_step_rank", hidden),
        bias=keys.flag("use_bias"),
        conv_bias=keys.flag("use_conv_bias", default=True),
    )
    return Text((Layer((block,), norms=1),) * _count(keys), tied=True)


def _mamba2(keys: Keys) -> Text:
    block = Mamba2(
        num_heads=keys.integer("num_heads"),
        head_dim=keys.integer("head_dim"),
        state_size=keys.integer("state_size"),
        num_groups=keys.integer("n_groups"),
        conv_kernel=keys.integer("conv_kernel", default=4),
        bias=keys.flag("use_bias"),
        conv_bias=keys.flag("use_conv_bias", default=True),
    )
    return Text((Layer((block,), norms=1),) * _count(keys))


_QWEN_NORMED = Heads("attention_bias", "attention_bias", qk_norm="head")
_ALL_NORMED = Heads("attention_bias", "attention_bias", qk_norm="all")

FAMILIES: Mapping[str, Family] = {
    "llama": _decoder(feed_forward=lambda keys, index: _mixtral(keys, bias=keys.flag("mlp_bias"))),
    "llama4_text": _llama4,
    "mistral": _decoder(Heads(), kinds=_all_sliding),
    "ministral": _decoder(Heads(), kinds=lambda keys, count: keys.per_layer(["layer_types"], count, lambda i: SLIDING)),
    "mixtral": _decoder(Heads(), kinds=_all_sliding),
    "qwen2": _decoder(Heads(qkv_bias=True), kinds=_from_layer_on),
    "qwen2_moe": _decoder(Heads(qkv_bias="qkv_bias"), feed_forward=_qwen_feed_forward, kinds=_qwen2_moe_kinds),
    "qwen3": _decoder(_QWEN_NORMED, kinds=_from_layer_on),
    "qwen3_moe": _decoder(_QWEN_NORMED, feed_forward=_qwen_feed_forward, kinds=_all_sliding, always=("use_qk_norm",)),
    "qwen3_next": _qwen_hybrid(_qwen_feed_forward),
    "qwen3_5_text": _qwen_hybrid(lambda keys, index: _dense(keys)),
    "qwen3_5_moe_text": _qwen_hybrid(_qwen_feed_forward),
    "qwen4_exp_text": _qwen4_exp,
    "qwen2_5_vl_text": _decoder(Heads(qkv_bias=True), kinds=_from_layer_on),
    "qwen2_vl_text": _decoder(Heads(qkv_bias=True), kinds=_from_layer_on),
    "qwen3_vl_text": _decoder(_QWEN_NORMED),
    "qwen3_vl_moe_text": _decoder(_QWEN_NORMED, feed_forward=_qwen_feed_forward),
    "gemma": _decoder(tied=True),
    "gemma2": _decoder(kinds=_every(2), norms=4, tied=True),
    "gemma3_text": _decoder(_QWEN_NORMED, kinds=_every(6), norms=4, tied=True),
    "gpt_oss": _decoder(
        Heads("attention_bias", "attention_bias", sinks=True),
        feed_forward=lambda keys, index: _mixtral(keys, bias=True, router_bias=True),
        kinds=_every(2),
    ),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "kimi_linear": _kimi_linear,
    "glm": _decoder(Heads(qkv_bias="attention_bias")),
    "glm4": _decoder(Heads(qkv_bias="attention_bias"), norms=4),
    "glm4_moe": _glm4_moe,
    "phi3": _decoder(Heads(), kinds=_all_sliding),
    "olmo2": _decoder(_ALL_NORMED),
    "olmo3": _decoder(_ALL_NORMED, kinds=_every(4)),
    "olmoe": _decoder(_ALL_NORMED),
    "granite": _decoder(feed_forward=lambda keys, index: _mixtral(keys, bias=keys.flag("mlp_bias"))),
    "granitemoe": _decoder(),
    "granitemoehybrid": _granite_hybrid,
    "cohere2": _decoder(kinds=_every(4), norms=1, parallel=True, tied=True),
    "smollm3": _decoder(
        feed_forward=lambda keys, index: _dense(keys, bias="mlp_bias"), kinds=_smollm3_kinds, tied=True
    ),
    "exaone4": _decoder(Heads(qk_norm="head"), kinds=_every(4)),
    "minimax": _minimax,
    "minimax_m2": _minimax_m2,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "jamba": _jamba,
    "bamba": _bamba,
    "mamba": _mamba,
    "mamba2": _mamba2,
}

# Defaults of transformers for keys that files leave out. Other keys are absent or missing, as in transformers; a test
# removes every key of every family.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama4_text": {"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2": {"use_sliding_window": False, "num_key_value_heads": 32},
    "qwen2_vl_text": {"use_sliding_window": False, "num_key_value_heads": 8},
    "qwen2_5_vl_text": {"use_sliding_window": False, "num_key_value_heads": 8},
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "shared_expert_intermediate_size": 5632,
        "use_sliding_window": False,
    },
    "qwen3": {"use_sliding_window": False, "num_key_value_heads": 32, "head_dim": 128},
    "qwen3_vl_text": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_vl_moe_text": {"num_key_value_heads": 16},
    "qwen3_moe": {"use_sliding_window": False, "num_key_value_heads": 4},
    "qwen3_next": {"num_key_value_heads": 2, "head_dim": 256, "shared_expert_intermediate_size": 512},
    "qwen3_5_text": {"num_key_value_heads": 4, "head_dim": 256},
    "qwen3_5_moe_text": {"num_key_value_heads": 2, "head_dim": 256, "shared_expert_intermediate_size": 512},
    "qwen4_exp_text": {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hc_count": 4,
        "hc_lowrank": 320,
        "shared_expert_intermediate_size": 512,
    },
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 4096,
    },
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "sliding_window": 128},
    "deepseek_v2": {"q_lora_rank": 1536, "n_shared_experts": 2},
    "deepseek_v3": {"q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3},
    "deepseek_v32": {"q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3},
    "kimi_linear": {"num_shared_experts": 1, "first_k_dense_replace": 1},
    "glm": {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    "glm4_moe": {"num_key_value_heads": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "olmo3": {"sliding_window": 4096, "max_position_embeddings": 2048},
    "cohere2": {"sliding_window": 4096},
    "smollm3": {"num_key_value_heads": 4},
    "exaone4": {"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 2048},
    "minimax": {"num_key_value_heads": 8},
    "minimax_m2": {"num_key_value_heads": 8, "head_dim": 128},
    "nemotron_h": {"num_key_value_heads": 8, "head_dim": 128},
    "falcon_h1": {"num_key_value_heads": 8, "mamba_d_ssm": 1024},
    "jamba": {"num_key_value_heads": 8},
    "bamba": {"num_key_value_heads": 8},
}
