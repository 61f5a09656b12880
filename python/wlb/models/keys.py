"""Reading a Hugging Face config: every key by its type, and nothing that matters left unread."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from wlb._core import MAX_TOKENS

T = TypeVar("T")

# Keys that change FLOPs, parameters or memory in some family. One that is set to something and that the family at hand
# does not read is refused: what it would cost is not known.
_MATTER = (
    "add_cross_attention",
    "altup_num_inputs",
    "attention_bias",
    "attention_chunk_size",
    "attention_k_eq_v",
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "audio_config",
    "cross_attention_layers",
    "expert_layer_period",
    "first_k_dense_replace",
    "full_attention_interval",
    "fullatt_block_indexes",
    "hc_count",
    "hidden_size_per_layer_input",
    "hybrid_override_pattern",
    "index_topk",
    "indexer_budget",
    "interleave_moe_layer_step",
    "is_encoder_decoder",
    "kv_lora_rank",
    "laurel_rank",
    "layers_block_type",
    "linear_attn_config",
    "linear_num_value_heads",
    "mamba_d_state",
    "mlp_bias",
    "mlp_layer_types",
    "mlp_only_layers",
    "moe_latent_size",
    "moe_layer_freq",
    "moe_layers",
    "n_routed_experts",
    "n_shared_experts",
    "no_kv_layers",
    "num_experts",
    "num_kv_shared_layers",
    "num_local_experts",
    "num_nextn_predict_layers",
    "num_shared_experts",
    "ple_layer_ids",
    "q_lora_rank",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "state_size",
    "text_config",
    "use_bias",
    "use_bidirectional_attention",
    "use_qk_norm",
    "vision_config",
)

_TYPES: dict[type, str] = {int: "an integer", bool: "true or false", str: "text", list: "a list", dict: "an object"}


class Refused(Exception):
    """An error in a configuration: the key, the value and the reason."""

    def __init__(self, message: str, value: object) -> None:
        super().__init__(message)
        self.value = value


class Keys:
    """One object of a config; remembers which keys were read.

    Args:
        content: the object.
        defaults: what transformers takes for keys that are missing, where files are known to leave them out.
    """

    def __init__(self, content: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        self._content, self._defaults = content, defaults or {}
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Whether the key is set to something."""
        self._read.add(name)
        return self._content.get(name) is not None

    @overload
    def read(self, kind: type[T], *names: str) -> T: ...
    @overload
    def read(self, kind: type[T], *names: str, default: T) -> T: ...
    def read(self, kind: type[T], *names: str, default: Any = ...) -> T:
        """Value of the first of these keys that is set; it must have the given type.

        Raises:
            Refused: no key is set and there is no default; or another type.
        """
        self._read.update(names)
        missing = [name for name in names if name not in self._content]  # null is no default, it is none
        for content, present in ((self._content, names), (self._defaults, missing)):
            for name in present:
                value = content.get(name)
                if value is not None:
                    return _typed(name, value, kind)
        if default is ...:
            raise Refused(f"lacks {names[-1]}", None)
        return default  # type: ignore[no-any-return]

    def integer(self, *names: str, default: int | None = None) -> int:
        """A whole number."""
        return self.read(int, *names) if default is None else self.read(int, *names, default=default)

    def positive(self, *names: str, default: int | None = None) -> int:
        """A whole number that something is divided by, or a size that is not optional.

        Raises:
            Refused: it is below 1.
        """
        return self._at_least(1, names, default)

    def count(self, *names: str, default: int | None = None) -> int:
        """A whole number of what there may be none of.

        Raises:
            Refused: it is below 0.
        """
        return self._at_least(0, names, default)

    def _at_least(self, minimum: int, names: tuple[str, ...], default: int | None) -> int:
        number = self.integer(*names, default=default)
        if number < minimum:
            key = next((name for name in names if name in self), names[-1])
            raise Refused(f"has {key} = {number}: must be at least {minimum}", number)
        return number

    def flag(self, *names: str, default: bool = False) -> bool:
        """True or false."""
        return self.read(bool, *names, default=default)

    def integers(self, name: str, default: Sequence[int]) -> list[int]:
        """A list of whole numbers."""
        return [_typed(name, entry, int) for entry in self.read(list, name, default=list(default))]

    def section(self, name: str, defaults: Mapping[str, Any] | None = None) -> Keys:
        """An object inside."""
        return Keys(self.read(dict, name), defaults)

    def pass_over(self, *names: str) -> None:
        """Takes these keys as read: they say nothing that others do not."""
        self._read.update(names)

    def per_layer(self, names: Sequence[str], count: int, otherwise: Callable[[int], str]) -> list[str]:
        """The kinds of `count` layers: a list where one of these keys has it, else what a family's rule says.

        Raises:
            Refused: the list is of another length.
        """
        for name in names:
            if name in self:
                kinds = [_LEGACY.get(str(kind), str(kind)) for kind in self.read(list, name)]
                if len(kinds) != count:
                    raise Refused(f"has {len(kinds)} {name} and {count} layers", kinds)
                return kinds
        return [otherwise(index) for index in range(count)]

    def window(self) -> int:
        """Keys of a sliding window that is in use and smaller than the context; 0: there is none."""
        window = self.integer("sliding_window", default=0)
        if window < 0:
            raise Refused(f"has sliding_window = {window}: must not be negative", window)
        context = self.integer("max_position_embeddings", default=0) or MAX_TOKENS
        # Qwen writes a window and does not use it; a window no smaller than the context hides nothing.
        return window if self.flag("use_sliding_window", default=True) and window < min(context, MAX_TOKENS) else 0

    def only(self, name: str, expected: object) -> None:
        """Reads a key that may have one value alone.

        Raises:
            Refused: it has another.
        """
        value: object = self.read(type(expected), name, default=expected)
        if value != expected:
            raise Refused(f"has {name} {value!r}: what that costs is not known to wlb", value)

    def finish(self) -> None:
        """Refuses what matters and was not read."""
        unknown = [name for name in _MATTER if name not in self._read and self._content.get(name)]
        if "layer_types" not in self._read:
            kinds = self.read(list, "layer_types", default=[])
            layers = self._content.get("num_hidden_layers", len(kinds))
            if kinds and len(kinds) != layers:
                raise Refused(f"has {len(kinds)} layer_types and {layers} layers", kinds)
            if any(_LEGACY.get(str(kind), str(kind)) != "full_attention" for kind in kinds):
                unknown.append(f"layer_types {sorted(set(map(str, kinds)))}")
        if "sliding_window" not in self._read and (window := self.window()):
            unknown.append(f"sliding_window {window}")
        if unknown:
            raise Refused(f"has {', '.join(unknown)}: what that costs is not known to wlb", unknown[0])
        if "decoder_sparse_step" not in self._read:
            self.only("decoder_sparse_step", 1)


# What older files call kinds of layers.
_LEGACY = {"attention": "full_attention", "mamba": "linear_attention"}


def _typed(name: str, value: object, kind: type[T]) -> T:
    if kind is dict and isinstance(value, Mapping):
        return value  # type: ignore[return-value]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Refused(f"has {name} {value!r}, not {_TYPES[kind]}", value)
    return value
