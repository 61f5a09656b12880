"""Counts parameters and FLOPs of model types that wlb has no family for, from the model that transformers builds.

The model is built on torch's meta device, which holds shapes and no weights, and counted module by module. Nothing is
downloaded. transformers is an optional dependency.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wlb.models.attention import Attention, Indexer, LatentAttention
from wlb.models.blocks import Block, Mask, Matrix
from wlb.models.counted import CountedBlock
from wlb.models.feed_forward import FeedForward
from wlb.models.keys import LEGACY, Keys, Refused, says_nothing
from wlb.models.layers import Layer
from wlb.models.text_families import FAMILIES

_ALL = 1 << 30
"""Larger than any number of stacked matrices: a token uses all of them."""

CHECKED_TOKENS = 16
"""Tokens of the forward on the meta device that the counted FLOPs are compared with."""


@dataclass
class Built:
    """Sizes and layers of a model that transformers built."""

    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]
    tied: bool  # whether embedding and output projection are one weight, or there is no output projection
    other_parameters: int  # outside layers, embedding, output projection and the last norm
    assumptions: tuple[str, ...]  # sentences for the user


def model_types() -> tuple[str, ...]:
    """Model types for which transformers has a causal or an image-text model. Empty if transformers is missing."""
    try:
        from transformers.models.auto import modeling_auto as auto
    except ImportError:
        return ()
    causal, images = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return tuple(sorted({*causal, *images}))


def read(content: Mapping[str, Any]) -> Built:
    """Counts the model of a configuration whose type wlb has no family for.

    Args:
        content: Content of the model's config.json.

    Raises:
        Refused: transformers or torch is missing, transformers does not know the type or refuses the configuration, or
            wlb does not know what some part of the model costs.
    """
    model_type = str(content["model_type"])
    try:
        import torch
        import transformers
    except ImportError:
        message = f"has model_type {model_type!r}, which wlb reads through transformers: pip install transformers torch"
        raise Refused(message, model_type) from None
    if model_type not in transformers.CONFIG_MAPPING:
        message = f"has model_type {model_type!r}, which neither wlb nor transformers {transformers.__version__} knows"
        more = "; its own code (auto_map) is not run" if content.get("auto_map") else ""
        raise Refused(f"{message}{more}", model_type)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(40)  # errors only
    try:
        kind = transformers.CONFIG_MAPPING[model_type]
        passed_over = [*_unread(kind, content, "")]
        config = _config(kind, content)
        reader = _Reader(config, _model(torch, transformers, config, content))
        if passed_over:
            reader.assumptions.append(f"not read, since documents do not meet it: {', '.join(passed_over)}")
        return reader.read()
    finally:
        transformers.logging.set_verbosity(verbosity)


def _config(kind: Any, content: Mapping[str, Any]) -> Any:
    try:
        return kind.from_dict(dict(content))
    except Exception as problem:  # transformers may raise any type for a file that it cannot read
        raise Refused(f"is refused by transformers: {_line(problem)}", content.get("model_type")) from problem


def _unread(kind: Any, content: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields the keys that transformers does not read and that cost documents nothing, such as those of a vision tower.

    Args:
        kind: transformers' configuration class.
        content: The configuration.
        where: Prefix of its keys, for a configuration inside another.

    Raises:
        Refused: transformers does not read a key, and it may change what documents cost.
    """
    known = {each.name for each in dataclasses.fields(kind)} | {*kind.attribute_map} | {*dir(kind)} | _words(kind)
    inner = getattr(kind, "sub_configs", {})
    for name, value in content.items():
        if name in inner and isinstance(value, Mapping):
            inside = inner[name]
            if not dataclasses.is_dataclass(inside):  # its model_type names the class
                from transformers import CONFIG_MAPPING

                said = value.get("model_type")
                inside = CONFIG_MAPPING[said] if isinstance(said, str) and said in CONFIG_MAPPING else None
            if inside is not None:
                yield from _unread(inside, value, f"{where}{name}.")
        elif name not in known and not says_nothing(name, value):
            if _ELSEWHERE.search(f"{where}{name}"):
                yield f"{where}{name}"
                continue
            message = f"has {where}{name} = {value!r:.60}: transformers' {kind.__name__} does not read it"
            raise Refused(f"{message}, and what it costs is not known", value)


# Keys of encoders of images and sounds, and of heads for multi-token prediction: they cost documents nothing here.
_ELSEWHERE = re.compile(r"vision|image|audio|video|mtp|nextn")


def _words(kind: Any) -> set[str]:
    """Every word in the code of a configuration and its models. A key that is not among them is read by nothing."""
    folder = Path(inspect.getfile(kind)).parent
    return {word for path in folder.glob("*.py") for word in re.findall(r"\w+", path.read_text())}


def _model(torch: Any, transformers: Any, config: Any, content: Mapping[str, Any]) -> Any:
    from transformers.models.auto import modeling_auto as auto

    named = [str(name) for name in content.get("architectures") or ()]
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    images = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    generating = {name for each in (causal, images) if each for name in ([each] if isinstance(each, str) else each)}
    both = getattr(auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {}).get(config.model_type)
    generating |= {both} if isinstance(both, str) else set()
    alike = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in generating}
    chosen = [alike[key] for name in named if (key := re.sub(r"[^a-z0-9]", "", name.lower())) in alike]
    if named and not chosen:
        says = f"says architectures {', '.join(named)}"
        if not generating:
            raise Refused(f"{says}: transformers has no language model of type {config.model_type!r}", named[0])
        expected = ", ".join(sorted(generating))
        raise Refused(f"{says}, where transformers has {expected}: that is another model", named[0])
    for each in (images, causal):
        chosen = chosen or ([each] if isinstance(each, str) else [*(each or ())])
    if not chosen:
        raise Refused(f"has model_type {config.model_type!r}, of which transformers has no language model", None)
    kind = getattr(transformers, chosen[0])
    if getattr(config, "is_encoder_decoder", False):
        if not causal or (named and chosen[0] != causal):
            message = "is an encoder and a decoder, which read two documents each: wlb plans documents of one sequence"
            raise Refused(message, config.model_type)
        config.is_encoder_decoder = False
    if getattr(config, "is_decoder", True) is False:
        config.is_decoder = True
    try:
        with torch.device("meta"):
            return kind._from_config(config, attn_implementation="eager").eval()
    except Exception as problem:
        raise Refused(f"cannot be built by transformers: {type(problem).__name__}: {_line(problem)}", None) from problem


def _line(problem: Exception) -> str:
    return next((line for line in str(problem).splitlines() if line.strip()), type(problem).__name__).strip()[:300]


_ATTENTION = re.compile(r"[Aa]ttention|[Aa]ttn|MLA")
_CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)
_RECURRENT = re.compile(
    r"Mamba|SSM|Delta|Rwkv|RWKV|LSTM|Recurrent|RGLRU|RgLru|Lightning|LinearAttention|Retention|KDA|Conv(?!1D)"
)
_OTHER_TOWER = re.compile(
    r"vision|visual|audio|image|speech|sound|video|vit\b|vqmodel|vqgan|tower|resampler|qformer|perceiver|"
    r"projector|depth_decoder|generation|mtp|patcher|action|expert_model",
    re.IGNORECASE,
)
# "reference_sliding_attention" is a window in generation only: in training all tokens see the reference.
_FULL = ("full_attention", "global", "attention", "full", "hybrid", "reference_sliding_attention")
_SLIDING = ("sliding_attention", "local", "local_attention", "sliding", "hybrid_sliding")

# Keys that may change which keys a query sees or how often a layer runs. A key is refused unless this file reads it
# (`_NOT_SUSPECT`) or it means something else (`_INNOCENT`).
_SUSPECT = re.compile(
    r"(^|_)(index|indexer|sparse|compress|compression|csa|hca|moba|nsa|block_sparse|block_size|kpool|stride|sink_window|"
    r"local|attention_window|window|chunk_size|loop|loops|recurrences|recurrent_depth|cycles|h_cycles|"
    r"cla|mod_capacity|layer_skip)(_|$)"
)
_INNOCENT = re.compile(r"expert|layer_|sliding_window_pattern|indexer_types|kwargs|rope|mtp|_freq$|_offset$")
_NOT_SUSPECT = frozenset(
    {
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "attention_chunk_size",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "chunk_size_feed_forward",
        "chunk_size",
        "window_size",
        "local_attention",
        "index_topk",
        "decoder_sparse_step",
        "router_sparse_step",
        "num_sparse_encoder_layers",
        "sparse_step",
        "mamba_chunk_size",
        "swiglu_limit",
        "sliding_window_size",
        "attention_window_size",
        "index_n_heads",
        "index_head_dim",
        "index_kpool",
        "index_kpool_always_select_tail",
    }
)


@dataclass
class _Reader:
    """Reads one model."""

    whole: Any  # transformers' configuration of the whole model
    model: Any
    assumptions: list[str] = field(default_factory=list)

    def read(self) -> Built:
        config = self.whole.get_text_config(decoder=True)
        self.config = config
        languages = self._get("languages")
        if isinstance(languages, (list, tuple)) and len(languages) > 1:  # X-MOD
            raise Refused(f"has adapters of {len(languages)} languages, of which a token meets one", None)
        if self._get("use_bidirectional_attention") is True:
            raise Refused("has use_bidirectional_attention: a decoder's attention is causal", True)
        path, stack = self._stack()
        self.hidden = self._hidden(stack)
        layers = self._by_family(stack)
        if layers is not None:
            return self._whole(path, layers)
        kinds: dict[object, Layer] = {}
        layers = []
        each_layer = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * len(stack)
        for index, module in enumerate(stack):
            self.config = each_layer[index]
            kind = self._kind(module, index, len(stack))
            key = (type(module), kind, _shapes(module))
            if key not in kinds:
                kinds[key] = self._layer(module, kind)
            layers.append(kinds[key])
        self.config = config
        said = [*self.assumptions]
        found = self._whole(path, layers)
        beside = self._check_forward(path, layers, found.vocab_size)
        if beside is not None:
            first = layers[0]
            layers[0] = dataclasses.replace(first, sublayers=(*first.sublayers, beside))
            self.assumptions[:] = said
            found = self._whole(path, layers)
        return dataclasses.replace(found, assumptions=tuple(self.assumptions))

    def _by_family(self, stack: Sequence[Any]) -> list[Layer] | None:
        """Layers as wlb's family of text models describes them; None without a family, or if parameters differ."""
        family = FAMILIES.get(self.config.model_type)
        if family is None:
            return None
        try:
            layers = [*family(Keys(self.config.to_dict())).layers]
        except (Refused, ValueError):
            return None
        counts = [sum(parameter.numel() for parameter in module.parameters()) for module in stack]
        return layers if counts == [layer.parameters(self.hidden) for layer in layers] else None

    def _whole(self, path: str, layers: Sequence[Layer]) -> Built:
        """The counts of the whole model, from its layers. Refuses a model with fewer parameters than were counted."""
        vocabulary = self._integer("vocab_size")
        total = sum(parameter.numel() for parameter in self.model.parameters())
        inside = sum(layer.parameters(self.hidden) for layer in layers)
        output = self._output(vocabulary)
        tied = output is None or output.weight is self.model.get_input_embeddings().weight
        embedding = (1 if tied else 2) * vocabulary * self.hidden
        rest = total - inside - embedding - self.hidden
        if rest < -self.hidden:
            message = f"has {total} parameters, of which {inside} in layers and {embedding} of embeddings of its width"
            raise Refused(f"{message}: that is not understood", total)
        self._say(path, rest, len(layers))
        return Built(self.hidden, vocabulary, tuple(layers), tied, rest, tuple(self.assumptions))

    # The stack of layers.

    def _stack(self) -> tuple[str, Sequence[Any]]:
        names = ("decoder_layers", "num_hidden_layers", "num_layers", "n_layer", "n_layers")
        counts = [value for name in names if isinstance(value := self._get(name), int) and value]
        for count in counts:
            if found := self._stacks(count):
                break
        else:
            raise Refused(f"has {counts} layers, which are not found in {type(self.model).__name__}", None)
        _, path, stack = max(found, key=lambda each: each[0])
        others = [name for _, name, _ in found if name != path and not name.startswith(f"{path}.")]
        if any(size for size, name, _ in found if name in others and size):
            raise Refused(f"has several stacks of {len(stack)} layers: {', '.join([path, *others])}", None)
        return path, stack

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

    def _get(self, name: str) -> Any:
        """A value of the current layer's configuration, or None."""
        try:
            return getattr(self.config, name, None)
        except RuntimeError:  # transformers raises it if layers have different values
            return None

    def _hidden(self, stack: Sequence[Any]) -> int:
        return self._integer("hidden_size", "d_model", "n_embd", "word_embed_dim")

    def _integer(self, *names: str) -> int:
        for name in names:
            value = self._get(name)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        raise Refused(f"has no {names[0]} that transformers' configuration would say", None)

    # Masks.

    def _kind(self, module: Any, index: int, count: int) -> tuple[str, int]:
        """The mask of a layer's attention: ("full", 0), ("window", size), ("chunk", size), or another kind's name."""
        kinds = self._get("layer_types") or self._get("layers_block_type")
        if isinstance(kinds, (list, tuple)) and len(kinds) == count:
            kind = LEGACY.get(str(kinds[index]), str(kinds[index]))
        else:
            kind = ""
        window = self._window(module)
        if kind in _FULL or (kind == "indexed_attention" and self._get("index_topk")):
            return ("full", 0)
        if kind in _SLIDING:
            if not window:
                raise Refused(f"has layer_types {kind!r} and no sliding_window", kind)
            return ("window", window)
        if kind == "chunked_attention":
            chunk = self._get("attention_chunk_size")
            return ("chunk", int(chunk)) if chunk else ("full", 0)
        if kind:
            return (kind, 0)
        local = self._get("attention_layers")
        if isinstance(local, (list, tuple)) and len(local) == count:  # GPT-Neo
            return ("window", self._integer("window_size")) if local[index] == "local" else ("full", 0)
        return ("window", window) if window else ("full", 0)

    def _window(self, module: Any) -> int:
        """Tokens that a query of the layer sees, itself included; 0: no window.

        The attention module's own `sliding_window` has precedence over the configuration.
        """
        if self._get("use_sliding_window") is False:
            return 0
        for inner in module.modules():
            if _ATTENTION.search(type(inner).__name__) and hasattr(inner, "sliding_window"):
                size = inner.sliding_window
                size = size[0] + 1 if isinstance(size, tuple) and size and isinstance(size[0], int) else size
                return int(size) if isinstance(size, int) and size > 0 else 0
        names = ("sliding_window", "sliding_window_size", "attention_window_size")
        size = next((value for name in names if (value := self._get(name))), None)
        return int(size) if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 0

    # One layer.

    def _layer(self, module: Any, kind: tuple[str, int]) -> Layer:
        if _CROSS.search(type(module).__name__):  # Mllama skips such a layer if there is no image
            return Layer((self._not_run(module),), norms=0)
        parts = [(name, part) for name, part in _outermost(module) if self._is_mixer(part)]
        taken = {id(parameter) for _, part in parts for parameter in part.parameters()}
        blocks: list[Block] = []
        for name, part in parts:
            if _CROSS.search(f"{name} {type(part).__name__}") and not self._is_only(parts, part):
                blocks.append(self._not_run(part))
            elif _ATTENTION.search(type(part).__name__) and not _is_state(part):
                blocks.append(self._attention(part, kind))
            else:
                blocks.append(self._recurrent(part, kind))
        rest = [each for each in _weights(module, self._experts_visited()) if not each.ids & taken]
        for each in rest:
            if each.matrix is not None and re.search(r"(^|\.)vision_moe\.", each.name):  # ERNIE's, for images only
                each.matrix = dataclasses.replace(each.matrix, used=0)
                self._assume("experts of images have parameters and no work")
        streams = {
            id(parameter)
            for inner in module.modules()
            if type(inner).__name__.endswith("HyperConnection")
            for parameter in inner.parameters()
        }
        mixing = [each for each in rest if each.ids & streams]
        if mixing:
            rest = [each for each in rest if not each.ids & streams]
            blocks.append(
                CountedBlock(
                    weights=_matrices(mixing),
                    other_parameters=_vectors(mixing),
                    streams=self._integer("hc_mult"),
                )
            )
        feed_forward = self._feed_forward(rest)
        norms = sum(each.count for each in rest)
        norms -= feed_forward.parameters(self.hidden) if feed_forward is not None else 0
        states = sum(each.state_flops for each in rest)
        of_rows, left = divmod(max(norms, 0), self.hidden)
        if feed_forward is not None:
            blocks.append(feed_forward)
        if left or norms < 0 or states:
            blocks.append(CountedBlock(weights=(), other_parameters=max(left, 0), state_flops=states))
        if not blocks:
            raise Refused(f"has a layer {type(module).__name__} without parameters", None)
        layer = Layer(tuple(blocks), norms=of_rows)
        counted = sum(parameter.numel() for parameter in module.parameters())
        if layer.parameters(self.hidden) != counted:
            message = f"has a layer {type(module).__name__} of {counted} parameters, read as"
            raise Refused(f"{message} {layer.parameters(self.hidden)}: that is not understood", counted)
        return layer

    def _is_mixer(self, part: Any) -> bool:
        name = type(part).__name__
        if not any(True for _ in part.parameters()):
            return False
        return bool(_ATTENTION.search(name) or (_RECURRENT.search(name) and not _leaf(part))) and not _is_norm(part)

    @staticmethod
    def _is_only(parts: Sequence[tuple[str, Any]], part: Any) -> bool:
        return len(parts) == 1 and parts[0][1] is part

    def _not_run(self, part: Any) -> Block:
        self._assume("cross-attention has parameters and no work: there is nothing beside the document")
        weights = _weights(part, 1)
        return CountedBlock(
            weights=tuple(dataclasses.replace(matrix, used=0) for matrix in _matrices(weights)),
            other_parameters=_vectors(weights),
        )

    def _attention(self, part: Any, kind: tuple[str, int]) -> Block:
        """`Attention` or `LatentAttention` if one of them has the module's parameters, otherwise a `CountedBlock`."""
        if self._get("compress_rates") and hasattr(part, "compressor"):
            return self._compressed(part, kind[0])
        in_blocks = self._get("index_block_size") is not None and hasattr(part, "indexer")
        if in_blocks and part.indexer is not None:
            return self._by_blocks(part)
        mask = Mask() if in_blocks else self._mask(part, kind)
        weights = _weights(part, 1)
        matrices = [each for each in weights if each.matrix is not None]
        heads = _first(part, self.config, "num_heads", "num_attention_heads", "n_heads", "n_head", "num_q_heads", "nh")
        if not heads:
            raise Refused(f"has {type(part).__name__}, whose heads are not found", None)
        outputs = [each for each in matrices if each.matrix and each.matrix.columns == self.hidden]
        named = [each for each in outputs if re.search(r"(^|[._])(o|out|output|dense|c|w?o|o_b)(_|\.|$)", each.name)]
        if not outputs:
            raise Refused(f"has {type(part).__name__} without an output projection", None)
        output = (named or outputs)[-1]
        assert output.matrix is not None
        values = output.matrix.rows
        indexer = self._indexer(part)
        latent = self._latent(part, mask, heads, indexer)
        if latent is not None:
            return latent
        head_dim = _first(part, self.config, "head_dim", "attention_head_size", "head_size", "d_head", "d_kv")
        if self._get("index_topk"):
            raise Refused("has index_topk and attention that is not latent: what that costs is not known to wlb", None)
        if not head_dim or head_dim * heads != values:
            if values % heads:
                raise Refused(f"has {type(part).__name__} of {heads} heads and {values} values: not understood", None)
            head_dim = values // heads
        kv_heads = self._kv_heads(part, heads, head_dim, matrices)
        exact = self._plain(part, weights, mask, heads, kv_heads, head_dim)
        if exact is not None:
            return exact
        return CountedBlock(
            weights=_matrices(matrices),
            other_parameters=_vectors(weights),
            mask=mask,
            pair_flops=4 * heads * head_dim,
            state_flops=sum(each.state_flops for each in weights),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            kv_width=2 * kv_heads * head_dim,
        )

    def _compressed(self, part: Any, kind: str) -> Block:
        """DeepSeek V4's attention: a window, and compressed keys that stand for `rate` tokens each.

        A query sees all compressed keys before it, or those that an indexer selects. At `position` there are
        `floor((position + 1) / rate)`. The count leaves out the rounding, which is about half a key too many.
        """
        rates, window = self._get("compress_rates"), self._get("sliding_window")
        heads, width = self._integer("num_attention_heads"), self._integer("head_dim")
        weights = _weights(part, 1)
        flops, more, keys = 4 * heads * width, [], width
        if kind != "window":
            rate = rates.get(kind) if isinstance(rates, Mapping) else None
            if not isinstance(rate, int) or rate < 1 or part.compressor is None:
                raise Refused(f"has layer_types {kind!r} without its rate in compress_rates", kind)
            selected = Mask()
            if kind == "compressed_sparse_attention":
                count, width_of_index = self._integer("index_n_heads"), self._integer("index_head_dim")
                more.append((Mask(), round(2 * count * (width_of_index + 1) / rate)))
                selected = Mask("window", self._integer("index_topk") * rate)
                keys += -(-width_of_index // rate)
            more.append((selected, round(flops / rate)))
            keys += -(-width // rate)
        return CountedBlock(
            weights=_matrices(weights),
            other_parameters=_vectors(weights),
            mask=Mask("window", int(window)),
            pair_flops=flops,
            other_pairs=tuple(more),
            num_heads=heads,
            num_kv_heads=1,
            head_dim=width,
            kv_width=keys,
        )

    def _by_blocks(self, part: Any) -> Block:
        """MiniMax M3's attention: a query sees the best blocks of keys and its own block, half full on average."""
        heads, kv_heads, width, block, kept, count, width_of_index = (
            self._integer(name)
            for name in (
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "index_block_size",
                "index_topk_blocks",
                "index_n_heads",
                "index_head_dim",
            )
        )
        weights = _weights(part, 1)
        return CountedBlock(
            weights=_matrices(weights),
            other_parameters=_vectors(weights),
            mask=Mask("window", (kept - 1) * block + (block + 1) // 2),
            pair_flops=4 * heads * width,
            other_pairs=((Mask(), 2 * count * width_of_index),),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=width,
            kv_width=2 * kv_heads * width + width_of_index,
        )

    def _kv_heads(self, part: Any, heads: int, head_dim: int, matrices: Sequence[_Weight]) -> int:
        keys = [each for each in matrices if re.search(r"(^|[._])(k|key|wk)(_|\.|$|proj|lin)", each.name)]
        if keys and keys[-1].matrix is not None and keys[-1].matrix.columns % head_dim == 0:
            return max(1, keys[-1].matrix.columns // head_dim)
        found = _first(part, self.config, "num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_heads_k")
        return found if found and heads % found == 0 else heads

    def _plain(
        self, part: Any, weights: Sequence[_Weight], mask: Mask, heads: int, kv_heads: int, head_dim: int
    ) -> Attention | None:
        biases = {each.name: each.matrix.bias for each in weights if each.matrix is not None}
        matrices = Counter((matrix.rows, matrix.columns) for matrix in _matrices(weights))
        if heads % kv_heads or any(each.state_flops for each in weights):
            return None
        q, kv = heads * head_dim, kv_heads * head_dim
        counted = sum(parameter.numel() for parameter in part.parameters())
        shapes = [
            Counter({(self.hidden, q): 1}) + Counter({(self.hidden, kv): 2}) + Counter({(q, self.hidden): 1}),
            Counter({(self.hidden, q + 2 * kv): 1}) + Counter({(q, self.hidden): 1}),
        ]
        if matrices not in shapes:
            return None
        for norm in ("none", "head", "all"):
            block = Attention(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                mask=mask,
                qkv_bias=any(bias for name, bias in biases.items() if not _is_output(name)),
                output_bias=any(bias for name, bias in biases.items() if _is_output(name)),
                qk_norm=norm,
            )
            if block.parameters(self.hidden) == counted:
                return block
        return None

    def _indexer(self, part: Any) -> Indexer | None:
        """The module's indexer, which selects keys by score; None if it has none."""
        for inner in part.modules():
            if type(inner).__name__.endswith("Indexer"):
                sizes = [getattr(inner, name, None) for name in ("n_heads", "head_dim", "index_topk")]
                if all(isinstance(size, int) for size in sizes):
                    return Indexer(num_heads=sizes[0], head_dim=sizes[1], top_k=sizes[2])  # type: ignore[arg-type]
                raise Refused(f"has {type(inner).__name__}, whose sizes are not found", None)
        return None

    def _latent(self, part: Any, mask: Mask, heads: int, indexer: Indexer | None) -> Block | None:
        """`LatentAttention` if it has the module's parameters, otherwise a `CountedBlock`; None: not latent."""
        config = self.config
        rank = self._get("kv_lora_rank")
        sizes = [self._get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
        if (
            not isinstance(rank, int)
            or not all(isinstance(size, int) for size in sizes)
            or not sizes[0]
            or not sizes[2]
        ):
            return None
        key, rope, value = (int(size) for size in sizes if size is not None)
        weights = _weights(part, 1)
        counted = sum(parameter.numel() for parameter in part.parameters())
        try:
            block = LatentAttention(
                num_heads=heads,
                kv_rank=rank,
                key_dim=key,
                rope_dim=rope,
                value_dim=value,
                query_rank=self._get("q_lora_rank") or 0,
                bias=bool(getattr(config, "attention_bias", False)),
                indexer=indexer,
            )
        except ValueError:
            block = None
        selected, pool = self._get("index_topk"), 1
        exact = block is not None and mask == Mask() and block.parameters(self.hidden) == counted
        if exact and (indexer is not None or not selected):
            return block
        if selected and (mask == Mask() or indexer is not None):  # selected by this or an earlier layer's indexer
            if mask != Mask():
                raise Refused("has an indexer beside a sliding window: what that costs is not known to wlb", None)
            # GLM-5-Next scores and keeps pools of keys. It may always keep the last pool, half full on average.
            pool = self._get("index_kpool") or 1
            mask = Mask("window", int(selected) + (pool // 2 if self._get("index_kpool_always_select_tail") else 0))
        return CountedBlock(
            weights=_matrices(weights),
            other_parameters=_vectors(weights),
            mask=mask,
            pair_flops=2 * heads * (key + rope + value),
            other_pairs=((Mask(), round(2 * indexer.num_heads * (indexer.head_dim + 1) / pool)),) if indexer else (),
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=-(-(key + rope + value) // 2),
            kv_width=rank + rope,
        )

    def _mask(self, part: Any, kind: tuple[str, int]) -> Mask:
        name, size = kind
        kept = getattr(part, "keep_window_size", None)
        if name == "full" and isinstance(kept, int):  # Doge: as many keys as a window of this size, but not the nearest
            return Mask("window", kept)
        for each in _suspects(self.config):
            message = f"has {each[0]} = {each[1]!r:.40}: what its attention does with that is not known to wlb"
            raise Refused(message, each[1])
        if name == "full":
            return Mask()
        if name in ("window", "chunk"):
            return Mask(name, size)  # type: ignore[arg-type]
        raise Refused(f"has layer_types {name!r}: what its attention meets is not known to wlb", name)

    def _recurrent(self, part: Any, kind: tuple[str, int]) -> Block:
        """A recurrent mixer: its matrices, convolutions and state. Refuses a state whose FLOPs are not known."""
        weights = _weights(part, _ALL)
        name = type(part).__name__
        states = _state_flops(part)
        convolutions = sum(each.state_flops for each in weights)
        if states is None and not re.search(r"ShortConv|RecurrentGemma", name):  # RecurrentGemma's is element-wise
            raise Refused(f"has {name}: what its state costs is not known to wlb", name)
        return CountedBlock(
            weights=_matrices(weights),
            other_parameters=_vectors(weights),
            state_flops=convolutions + (states or 0),
        )

    # Feed-forward blocks.

    def _experts_visited(self) -> int:
        for name in (
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_top_k",
            "moe_topk",
            "top_k_experts",
            "num_selected_experts",
            "moe_k",
            "top_k",
            "n_activated_experts",
        ):
            value = self._get(name)
            if isinstance(value, (list, tuple)) and value and len({*value}) == 1:
                value = value[0]
            if isinstance(value, int) and value > 0:
                return value
        return 0

    def _feed_forward(self, rest: Sequence[_Weight]) -> Block | None:
        matrices = [each for each in rest if each.matrix is not None]
        if not matrices:
            return None
        if self._get("zero_expert_num"):
            raise Refused("has zero_expert_num: a token visits fewer experts the more of these it visits", None)
        if not self._experts_visited() and any(each.matrix is not None and each.matrix.copies > 1 for each in matrices):
            raise Refused("has experts, and how many of them a token visits is not found in its configuration", None)
        exact = self._plain_feed_forward(matrices)
        if exact is not None:
            return exact
        return CountedBlock(
            weights=_matrices(matrices),
            other_parameters=_vectors(matrices),
        )

    def _plain_feed_forward(self, matrices: Sequence[_Weight]) -> FeedForward | None:
        shapes = _matrices(matrices)
        counted = sum(each.count for each in matrices)
        bias = any(matrix.bias for matrix in shapes)
        experts = [matrix for matrix in shapes if matrix.copies > 1]
        downs = [matrix for matrix in (experts or shapes) if matrix.columns == self.hidden]
        if not downs or any(matrix.rows != downs[0].rows for matrix in downs):
            return None
        copies, used, width = downs[0].copies, downs[0].used, downs[0].rows
        others = [m for m in shapes if m.copies == 1 and m.columns == self.hidden] if experts else []
        shared = sum(matrix.rows for matrix in others)
        expected = sum(2 * m.used * m.rows * m.columns for m in shapes)
        for gated in (True, False):
            for gate in (False, True):
                for router in (False, True):
                    try:
                        block = FeedForward(
                            width=width,
                            gated=gated,
                            bias=bias,
                            num_experts=copies,
                            experts_per_token=used,
                            shared_width=shared,
                            shared_gate=gate,
                            router_bias=router,
                        )
                    except ValueError:
                        continue
                    if block.parameters(self.hidden) == counted and block.token_flops(self.hidden) == expected:
                        return block
        return None

    # What is outside the layers.

    def _output(self, vocabulary: int) -> Any:
        embedding = self.model.get_input_embeddings()
        shape = tuple(getattr(embedding, "weight", embedding).shape) if embedding is not None else ()
        if len(shape) != 2 or shape[1] != self.hidden or shape[0] < vocabulary:
            raise Refused(f"has embeddings of shape {[*shape]}, not [{vocabulary}, {self.hidden}]", None)
        output = self.model.get_output_embeddings()
        if output is not None and (output.weight.shape[1] != self.hidden or output.weight.shape[0] < vocabulary):
            message = f"has an output projection of shape {[*output.weight.shape]}, not [{vocabulary}, {self.hidden}]"
            raise Refused(message, None)
        return output

    def _say(self, path: str, rest: int, count: int) -> None:
        total = sum(parameter.numel() for parameter in self.model.parameters())
        if rest > 0.001 * total:
            self._assume(f"{rest:,} parameters outside the {count} layers of {path} cost documents nothing")

    def _assume(self, sentence: str) -> None:
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)

    # The forward pass with which the count is compared.

    def _check_forward(self, path: str, layers: Sequence[Layer], vocabulary: int) -> CountedBlock | None:
        """Runs a forward on the meta device, and refuses counted FLOPs that are more than 1 % off.

        For models with recurrent states, only products of weight matrices are compared: implementations compute states
        in different ways. If the model cannot run without data, an assumption says so, or the model is refused.

        Returns:
            matrices outside the layers if their FLOPs explain the difference, such as Gemma 3n's projections before
            the first layer; otherwise None.
        """
        tokens = CHECKED_TOKENS
        experts = any(m.copies > 1 for layer in layers for b in layer.blocks for m in b.matrices(self.hidden))
        ran = None if experts and not self._batched_experts() else self._run(path, tokens)
        without_experts = ran is None and experts and self._pass_over_experts(layers)
        if without_experts:
            ran = self._run(path, tokens)
            if ran is not None:
                self._assume("what routed experts compute is not held to a run of the model, which needs data")
        if ran is None:
            known = (Attention, LatentAttention, FeedForward)
            other = {type(block).__name__ for layer in layers for block in layer.blocks if not isinstance(block, known)}
            if other:
                message = (
                    "cannot be run without data, and its layers are not of attention and feed-forward blocks alone"
                )
                raise Refused(f"{message}: what they cost is not known", None)
            self._assume("not held to a run of the model, which needs data")
            return None
        counter, with_output = ran
        counts = counter.get_flop_counts()
        rotary = sum(
            sum(ops.values()) for name, ops in counts.items() if re.search(r"rotary|rope", name.rsplit(".", 1)[-1])
        )
        ops = counts.get("Global", {})
        states = any(layer_block.recurrence() for layer in layers for layer_block in layer.blocks)
        products = sum(
            flops for op, flops in ops.items() if not states or str(op).rsplit(".", 1)[-1] in ("mm", "addmm")
        )
        products -= rotary
        ours = 2 * self.hidden * vocabulary * tokens if with_output else 0
        for layer in layers:
            for block in layer.blocks:
                matrices = block.matrices(self.hidden)
                counted = [m for m in matrices if m.copies == 1 or not (states or without_experts)]
                ours += sum(2 * m.used * m.rows * m.columns for m in counted) * tokens
            if not states:
                ours += sum(layer.pairs().values()) * tokens * tokens
        if abs(products - ours) > 0.01 * max(products, ours):
            beside = self._beside(path, whole=with_output)
            more = sum(2 * m.rows * m.columns for m in beside.weights) * tokens
            if beside.weights and abs(products - ours - more) <= 0.001 * products:
                return beside
            message = f"is counted as {ours:,} FLOPs of {tokens} tokens, and its forward computes {products:,}"
            raise Refused(f"{message}: something in it is not known to wlb", products)
        return None

    def _beside(self, path: str, *, whole: bool) -> CountedBlock:
        """Matrices outside the layers, without embedding and output projection.

        Args:
            path: Path of the list of layers.
            whole: Whether to take them from the whole model; False: from the module that holds the list of layers.
        """
        from torch import nn

        inner = self.model if whole else self.model.get_submodule(path.rpartition(".")[0])
        stack = {id(parameter) for parameter in self.model.get_submodule(path).parameters()}
        output = self.model.get_output_embeddings()
        found = [
            each
            for name, module in inner.named_modules()
            if isinstance(module, nn.Linear) and module is not output and not _OTHER_TOWER.search(name)
            for each in _of_module(name, module, dict(module.named_parameters(recurse=False)), 1)
            if not each.ids & stack
        ]
        return CountedBlock(weights=_matrices(found), other_parameters=_vectors(found))

    def _run(self, path: str, tokens: int) -> tuple[Any, bool] | None:
        """Counts the FLOPs of a forward of the model, or of the module that holds its layers if the model cannot run.

        Returns:
            the counter, and whether the whole model ran, with its output projection; None: neither runs without data.
        """
        import torch
        import torch.fx.experimental._config as meta
        from torch.utils.flop_counter import FlopCounterMode

        ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
        rows = torch.zeros((1, tokens, self.hidden), device="meta")
        inner = self.model.get_submodule(path.rpartition(".")[0])
        masks = (torch.ones_like(ids), None, torch.ones((1, 1, tokens, tokens), dtype=torch.bool, device="meta"))
        for module, given in ((self.model, {"input_ids": ids}), (inner, {"inputs_embeds": rows})):
            for mask in masks:
                try:
                    # There are no values to select by, so every entry counts as selected (X-MOD: one language).
                    every = meta.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
                    with every, torch.no_grad(), FlopCounterMode(display=False) as counter:
                        module(**given, attention_mask=mask, use_cache=False)
                except Exception:  # without data, a model's code may raise anything
                    continue
                return counter, module is self.model
        return None

    def _pass_over_experts(self, layers: Sequence[Layer]) -> bool:
        """Makes experts return zeros, if all of their parameters are counted as experts' matrices; whether it did."""
        import torch

        found = [module for module in self.model.modules() if type(module).__name__.endswith("Experts")]
        theirs = sum(parameter.numel() for module in found for parameter in module.parameters())
        matrices = (m for layer in layers for block in layer.blocks for m in block.matrices(self.hidden))
        if not found or theirs != sum(m.parameters(m.copies) for m in matrices if m.copies > 1):
            return False
        for module in found:
            module.forward = lambda rows, *_, **__: torch.zeros_like(rows)
        return True

    def _batched_experts(self) -> bool:
        try:
            self.model.set_experts_implementation("batched_mm")
        except Exception:
            return False
        return True


@dataclass
class _Weight:
    """Parameters that are counted together: a matrix with its bias and copies, or one that is no matrix."""

    name: str
    count: int  # number of parameters, with the bias and all copies
    ids: set[int]  # `id` of each parameter
    matrix: Matrix | None = None
    state_flops: int = 0  # forward FLOPs per token of a convolution

    @property
    def other(self) -> int:
        """Number of parameters that are not in the matrix."""
        return self.count - (self.matrix.parameters(self.matrix.copies) if self.matrix else 0)


_EXPERT = re.compile(r"^((?:.*\.)?(?:\w*_)?experts?)\.\d+(\..*)?$")


def _weights(module: Any, visited: int) -> list[_Weight]:
    """Counts every parameter once. A bias joins its matrix, and experts that are separate modules join one matrix.

    Args:
        module: Its parameters are counted, with those of the modules inside.
        visited: Experts that a token visits.
    """
    found: list[_Weight] = []
    seen: set[int] = set()
    experts: dict[tuple[str, int, int, int], _Weight] = {}
    for name, inner in module.named_modules():
        own = {each: value for each, value in inner.named_parameters(recurse=False) if id(value) not in seen}
        seen.update(id(value) for value in own.values())
        for each in _of_module(name, inner, own, visited):
            expert = _EXPERT.match(each.name)
            if expert is None or each.matrix is None or each.matrix.copies > 1 or "shared" in expert.group(1):
                found.append(each)
                continue
            matrix = each.matrix
            key = (f"{expert.group(1)}{expert.group(2) or ''}", matrix.rows, matrix.columns, each.other)
            first = experts.setdefault(key, each)
            if first is each:
                found.append(each)
                continue
            assert first.matrix is not None
            copies = first.matrix.copies + 1
            first.matrix = dataclasses.replace(first.matrix, copies=copies, used=min(visited, copies))
            first.count += each.count
            first.ids |= each.ids
    return found


def _of_module(name: str, inner: Any, own: dict[str, Any], visited: int) -> Iterator[_Weight]:
    """The module's own parameters, without those of the modules inside."""
    from torch import nn

    rest = dict(own)
    weight = own.get("weight")
    if weight is not None and isinstance(inner, (nn.Conv1d, nn.Conv2d)):
        del rest["weight"]
        yield _Weight(name, weight.numel(), {id(weight)}, state_flops=2 * weight.numel())
    for each, value in own.items():
        if each not in rest or value.dim() not in (2, 3) or 1 in value.shape[-2:]:
            continue
        full = f"{name}.{each}" if name and each != "weight" else name or each
        transposed = type(inner).__name__ == "Conv1D" or getattr(inner, "is_transposed", False)
        rows, columns = value.shape[-2:] if transposed else reversed(value.shape[-2:])
        copies = value.shape[0] if value.dim() == 3 else 1
        if value.dim() == 2 and not (
            each in ("weight", "fn") or each.endswith(("_proj", "_weight", ".weight", "_gate"))
        ):
            continue  # not a weight matrix, such as a table of a state's decays
        bias = rest.get("bias" if each == "weight" else f"{each}_bias")
        with_bias = bias is not None and bias.numel() == copies * columns
        used = 0 if isinstance(inner, nn.Embedding) else 1 if copies == 1 else min(visited, copies)
        split = not re.search(r"router|(^|\.)gate$", name)
        count, ids = value.numel(), {id(value)}
        if with_bias and bias is not None:
            count, ids = count + bias.numel(), ids | {id(bias)}
        yield _Weight(full, count, ids, Matrix(rows, columns, with_bias, copies, used, split, router=not split))
        rest = {other: kept for other, kept in rest.items() if id(kept) not in ids}
    for each, value in rest.items():
        yield _Weight(f"{name}.{each}" if name else each, value.numel(), {id(value)})


def _matrices(weights: Iterable[_Weight]) -> tuple[Matrix, ...]:
    """The matrices among the weights."""
    return tuple(each.matrix for each in weights if each.matrix is not None)


def _vectors(weights: Sequence[_Weight]) -> int:
    """Number of parameters that are in no matrix."""
    return sum(each.other for each in weights)


def _is_output(name: str) -> bool:
    return bool(re.search(r"(^|[._])(o|out|output|dense|c|wo)(_|\.|$)", name))


def _outermost(module: Any) -> Iterator[tuple[str, Any]]:
    """Path and module of a layer's mixers (attention or recurrent) that are not inside another mixer."""

    def walk(prefix: str, parent: Any) -> Iterator[tuple[str, Any]]:
        for name, child in parent.named_children():
            path = f"{prefix}.{name}" if prefix else name
            kind = type(child).__name__
            if (_ATTENTION.search(kind) or _RECURRENT.search(kind)) and not _is_norm(child) and not _leaf(child):
                yield path, child
            else:
                yield from walk(path, child)

    yield from walk("", module)


def _leaf(module: Any) -> bool:
    return not any(True for _ in module.children())


def _is_norm(module: Any) -> bool:
    return bool(re.search(r"norm", type(module).__name__, re.IGNORECASE)) and _leaf(module)


def _is_state(part: Any) -> bool:
    return bool(_RECURRENT.search(type(part).__name__)) and _state_flops(part) is not None


def _state_flops(part: Any) -> int | None:
    """Forward FLOPs per token of a recurrent state; None: not known for this mixer."""
    name = type(part).__name__.lower()

    def size(*names: str) -> int:
        return next((v for n in names if isinstance(v := getattr(part, n, None), int) and not isinstance(v, bool)), 0)

    if "delta" in name or (hasattr(part, "forget_gate") and hasattr(part, "b_proj")):  # the second: GLM-5-Next's
        heads, key, value = (
            size("num_v_heads", "num_heads"),
            size("head_k_dim", "head_dim"),
            size("head_v_dim", "head_dim"),
        )
        return 6 * heads * key * value or None
    if "mamba" in name or "ssm" in name:
        heads, width, state = size("num_heads", "n_heads"), size("head_dim"), size("ssm_state_size", "state_size")
        if hasattr(part, "x_proj") or hasattr(part, "x_proj_weight"):
            return 4 * size("intermediate_size", "inner_size") * state or None
        return 4 * heads * width * state or None
    return None


def _first(part: Any, config: Any, *names: str) -> int:
    for each in (*part.modules(), config):
        for name in names:
            value = getattr(each, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return 0


def _suspects(config: Any) -> Iterator[tuple[str, object]]:
    for name, value in sorted(vars(config).items()):
        if name in _NOT_SUSPECT or _INNOCENT.search(name) or says_nothing(name, value) or isinstance(value, str):
            continue
        if _SUSPECT.search(name) and isinstance(value, (int, list, tuple, dict)):
            yield name, value


def _shapes(module: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
