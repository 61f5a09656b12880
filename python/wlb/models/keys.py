"""Reading a Hugging Face config: every key by its type, and nothing that matters left unread."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from wlb._core import MAX_TOKENS

T = TypeVar("T")

# Keys that change neither FLOPs of matrices nor parameters: numbers of tokens, rates, names, what a run of inference
# does. Every other key must be read by the family at hand, or say nothing (null, false, 0 or empty).
_NEUTRAL = re.compile(
    r"""_.*|architectures|auto_map|model_type|.*version|(torch_|.*_)?dtype|.*quant(ization)?_config|compression_config
    |.*(token|tok|bos|eos|pad|unk|sep|mask|bor|eor)_(id|ids|index|list|indices)|.*_token_id_.*|.*_token
    |id2label|label2id|num_labels|problem_type|return_dict|return_dict_in_generate|output_.*|is_decoder|.*_use_cache
    |use_cache|cache_.*|finetuning_task|task_specific_params|tokenizer_.*|chat_template|torchscript|use_bfloat16|license
    |.*dropout.*|.*_pdrop|.*drop_path.*|.*_prob|.*eps|.*epsilon|initializer_.*|init(ializer)?_(std|range|method|scale)
    |.*_init(_.*)?|.*init_range|.*_std
    |(.*_)?rope(_.*)?|rotary_.*|(.*_)?theta|partial_rotary_factor|original_max_position_embeddings|mrope_.*|yarn_.*
    |initial_context_length|model_max_length|max_length|max_sequence_length|seq_length|max_seq_len|max_new_tokens
    |hidden_act(ivation)?|.*_(act|activation)|activation_function|position_embedding_type|apply_residual.*
    |.*(multiplier|multipliers|softcap|softcapping|scaling|scale|scalar|temperature|temperature_tuning)
    |.*(scaling|alpha|beta|interpolate)_factor|full_attn_mod|(embedding|logits)_(scale|scaling)|scale_.*|attn_scale
    |router_(aux|z).*|.*aux_loss.*|.*_loss_coef|seq_aux|scoring_func|score_func.*|norm_topk_prob|.*renormalize
    |n_group|topk_group|topk_method|num_expert_group|router_jitter_noise|moe_router_.*|use_routing_bias|router_dtype
    |moe_shared_expert_overlap|ep_size|pretraining_tp|num_logits_to_keep|logits_to_keep|use_grouped_topk
    |.*attn_implementation|use_flash.*|flash_attn|use_mamba_kernels|use_associative_scan|chunk_size_feed_forward
    |(mamba_)?chunk_size|time_step_(floor|limit|max|min|scale|init_scheme)|rescale_.*|residual_in_fp32|fp32_.*
    |mamba_norm_before_gate|norm_before_gate|number_of_conv_states|split_ngram_parts|seed|swiglu_(alpha|limit)
    |query_pre_attn_.*|floor_scale|qk_norm_type|gradient_checkpointing|n_ctx|.*_in_fp32|ignore_index|use_gemma_norm|norm_type|layernorm_type|(image|video|audio)_token_.*|vision_(start|end)_.*
    |use_mm_.*|pad_token|unsloth.*|base_model.*|dataset.*|inference_.*|training_.*|description|name|author.*|tags|comment
    |prefix|min_length|do_sample|top_p|early_stopping|num_beams.*|num_beam_groups|num_return_sequences|repetition_penalty|bad_words_ids
    |diversity_penalty|length_penalty|no_repeat_ngram_size|remove_invalid_values|exponential_decay.*|suppress_tokens
    |begin_suppress_tokens|typical_p|encoder_no_repeat_ngram_size|forced_.*|decoder_start_token_id|tf_legacy_loss
    |pruned_heads|top_k|_attn_.*|max_window_layers|dsa_.*dtype|expert_dtype|num_attention_layers_logged
    """,
    re.VERBOSE,
)


def says_nothing(name: str, value: object) -> bool:
    """Whether a key says nothing that FLOPs, parameters or memory depend on.

    Such a key is empty, false or 0; or is a rate, the number of a token, or an option of inference; or is a frequency
    of 1 (every layer); or names the default choice.

    Complexity:
        O(len(name)).

    Examples:
        >>> from wlb.models.keys import says_nothing
        >>> says_nothing("rope_theta", 1e4), says_nothing("num_experts", 8), says_nothing("num_experts", None)
        (True, False, True)
    """
    if value is None or value is False or value in (0, "", "default", "none", [], {}):
        return True
    if value == 1 and name.endswith(("_freq", "_interval", "_step", "_period")):
        return True
    return _NEUTRAL.fullmatch(name) is not None


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
        missing = [name for name in names if name not in self._content]  # null is a value: it says none
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
        """A whole number from 1 on: a divisor, or a size that is not optional.

        Raises:
            Refused: it is below 1.
        """
        return self._at_least(1, names, default)

    def count(self, *names: str, default: int | None = None) -> int:
        """A whole number from 0 on.

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
        """Marks these keys as read: other keys say the same."""
        self._read.update(names)

    def per_layer(self, names: Sequence[str], count: int, otherwise: Callable[[int], str]) -> list[str]:
        """The kinds of `count` layers: from a list under one of these keys, else by the family's rule.

        Raises:
            Refused: the list is of another length.
        """
        for name in names:
            if name in self:
                kinds = [LEGACY.get(str(kind), str(kind)) for kind in self.read(list, name)]
                if len(kinds) != count:
                    raise Refused(f"has {len(kinds)} {name} and {count} layers", kinds)
                return kinds
        return [otherwise(index) for index in range(count)]

    def window(self) -> int:
        """Keys of a sliding window that is used and smaller than the context; else 0."""
        window = self.integer("sliding_window", default=0)
        if window < 0:
            raise Refused(f"has sliding_window = {window}: must not be negative", window)
        context = self.integer("max_position_embeddings", default=0) or MAX_TOKENS
        # Qwen writes a window and does not use it; a window no smaller than the context hides nothing.
        return window if self.flag("use_sliding_window", default=True) and window < min(context, MAX_TOKENS) else 0

    def only(self, name: str, expected: object) -> None:
        """Reads a key for which only one value is supported.

        Raises:
            Refused: it has another.
        """
        value: object = self.read(type(expected), name, default=expected)
        if value != expected:
            raise Refused(f"has {name} {value!r}: what that costs is not known to wlb", value)

    def share(self, other: Keys) -> None:
        """Marks as read the keys that another reader of the same object has read."""
        self._read |= other._read

    def finish(self, where: str = "") -> None:
        """Refuses keys that were not read and are not known to be neutral.

        Args:
            where: name of the section, put before each key's name.

        Raises:
            Refused: naming the keys.
        """
        # A list of equal entries means full attention everywhere.
        if "layer_types" not in self._read:
            kinds = self.read(list, "layer_types", default=[])
            layers = self._content.get("num_hidden_layers", len(kinds))
            if kinds and len(kinds) != layers:
                raise Refused(f"has {len(kinds)} layer_types and {layers} layers", kinds)
            if any(LEGACY.get(str(kind), str(kind)) != "full_attention" for kind in kinds):
                unread = f"layer_types {sorted(set(map(str, kinds)))}"
                raise Refused(f"has {unread}: what that costs is not known to wlb", kinds)
        if "sliding_window" not in self._read and (window := self.window()):
            raise Refused(f"has sliding_window {window}: what that costs is not known to wlb", window)
        if "decoder_sparse_step" not in self._read:
            self.only("decoder_sparse_step", 1)
        unread_keys = [name for name, value in self._content.items() if not self._is_settled(name, value)]
        if unread_keys:
            said = ", ".join(f"{where}{name} = {self._content[name]!r:.60}" for name in unread_keys)
            raise Refused(f"has {said}: what that costs is not known to wlb", unread_keys[0])

    def _is_settled(self, name: str, value: object) -> bool:
        return name in self._read or name in _FOLLOW or says_nothing(name, value)


# Sizes that other keys say as well, in families that do not read them: latent attention has no heads of its own width.
_FOLLOW = frozenset(
    {
        "experts_per_token",
        "max_position_embeddings",
        "mamba_d_head",
        "mamba_expand",
        "expand",
        "no_rope_layer_interval",
        "no_rope_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "intermediate_size_mlp",
        "qk_head_dim",
        "sliding_window_pattern",
        "sliding_window_size",
        "time_step_rank",
    }
)

# Names of kinds of layers in older files.
LEGACY = {"attention": "full_attention", "mamba": "linear_attention"}


def _typed(name: str, value: object, kind: type[T]) -> T:
    if kind is dict and isinstance(value, Mapping):
        return value  # type: ignore[return-value]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Refused(f"has {name} {value!r}, not {_TYPES[kind]}", value)
    return value
