"""Lengths of token sequences as trainers' own code makes them of a data set: the oracles of the table of files.

Every function takes the data set that `datasets` loads from the file, as trainers do, and a tokenizer of transformers;
it returns the tokens of each sequence that is trained.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

Row = Mapping[str, Any]


def loaded(path: Path) -> Any:
    """The rows of a file, as `datasets` loads them."""
    datasets = pytest.importorskip("datasets")
    kind = "parquet" if path.suffix == ".parquet" else "json"
    return datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(path.parent / "cache"))


TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role != 'system' or not loop.first %}<|im_start|>{{ message.role }}
{% if message.reasoning_content and not no_thoughts %}<think>{{ message.reasoning_content }}</think>
{% endif %}{{ message.content if message.content else '' }}
{%- for call in message.tool_calls or [] %}
<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A chat template in the manner of Qwen's: turns between marks, tools, calls of tools, thoughts."""


def save_tokenizer(folder: Path, *, begins: bool = True) -> Any:
    """A tokenizer of bytes with merges, marks of turns, and an end of text; saved as fine-tunes have it.

    With `begins` it puts a begin of text before texts, as Llama's; else nothing, as Qwen's.
    """
    import tokenizers
    import transformers

    raw = tokenizers.Tokenizer(tokenizers.models.BPE())
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<image>"],
        show_progress=False,
    )
    raw.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog, and the user asks the assistant"] * 9, trainer
    )
    if begins:
        raw.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def by_template(rows: Any, tokenizer: Any, folder: Path) -> list[int]:
    """What `apply_chat_template` makes of a row's messages and tools."""
    return [
        len(tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=True)["input_ids"])
        for row in rows
    ]


def _tiny(tokenizer: Any, folder: Path, reward: bool) -> str:
    """A saved model with a few weights, since trainers load a copy of their own."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    config.num_labels = 1 if reward else 2
    kind = transformers.LlamaForSequenceClassification if reward else transformers.LlamaForCausalLM
    kind(config).save_pretrained(folder)
    return str(folder)


def _trl(trainer: str, rows: Any, tokenizer: Any, folder: Path) -> Any:
    trl = pytest.importorskip("trl")
    config = getattr(trl, f"{trainer}Config")(
        output_dir=str(folder), max_length=None, report_to=[], use_cpu=True, bf16=False
    )
    path = _tiny(tokenizer, folder / "model", trainer == "Reward")
    return getattr(trl, f"{trainer}Trainer")(
        path, args=config, train_dataset=rows, processing_class=tokenizer
    ).train_dataset


def trl_sft(rows: Any, tokenizer: Any, folder: Path) -> list[int]:
    """TRL's SFTTrainer."""
    return [len(row["input_ids"]) for row in _trl("SFT", rows, tokenizer, folder)]


def trl_dpo(rows: Any, tokenizer: Any, folder: Path) -> list[int]:
    """TRL's DPOTrainer: chosen and rejected of each pair."""
    return [
        len(row["prompt_ids"]) + len(row[side])
        for row in _trl("DPO", rows, tokenizer, folder)
        for side in ("chosen_ids", "rejected_ids")
    ]


def trl_reward(rows: Any, tokenizer: Any, folder: Path) -> list[int]:
    """TRL's RewardTrainer: chosen and rejected of each pair."""
    return [
        len(row[side]) for row in _trl("Reward", rows, tokenizer, folder) for side in ("chosen_ids", "rejected_ids")
    ]


def axolotl_chat(rows: Any, tokenizer: Any, folder: Path, *, messages: str = "messages") -> list[int]:
    """Follows axolotl's `type: chat_template`."""
    module = _module("axolotl.prompt_strategies.chat_template")
    prompter = module.ChatTemplatePrompter(
        tokenizer,
        tokenizer.chat_template,
        field_messages=messages,
        message_property_mappings={"role": "from", "content": "value"} if messages == "conversations" else None,
    )
    strategy = module.ChatTemplateStrategy(prompter, tokenizer, train_on_inputs=True, sequence_len=10**6)
    turns = [strategy.get_conversation_thread(row) for row in rows]
    tools = [strategy._get_tools(row) for row in rows]
    return [len(prompter.build_prompt(each, tools=of)) for each, of in zip(turns, tools, strict=True)]


def axolotl_alpaca(rows: Any, tokenizer: Any, folder: Path) -> list[int]:
    """Follows axolotl's `type: alpaca`."""
    tokenize, prompters = _module("axolotl.prompt_tokenizers"), _module("axolotl.prompters")
    strategy = tokenize.AlpacaPromptTokenizingStrategy(prompters.AlpacaPrompter(), tokenizer, False, 10**6)
    return [len(strategy.tokenize_prompt({"input": "", **row})["input_ids"]) for row in rows]


def axolotl_text(rows: Any, tokenizer: Any, folder: Path) -> list[int]:
    """Follows axolotl's `type: completion`."""
    module = _module("axolotl.prompt_strategies.completion")
    made = module.CompletionPromptTokenizingStrategy(module.CompletionPrompter(), tokenizer, False, 10**6)
    return [len(ids) for ids in made.tokenize_prompt({"text": [row["text"] for row in rows]})["input_ids"]]


_MAPPINGS: dict[str, dict[str, Any]] = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output", "system": None, "history": None},
    "query": {"prompt": "query", "query": None, "response": "response", "system": "system", "history": "history"},
    "pair": {"prompt": "prompt", "query": None, "response": "response", "system": None, "history": None},
    "sharegpt": {"messages": "conversations", "system": "system"},
}


def _llamafactory(rows: Any, tokenizer: Any, kind: str, *, ranking: bool = False) -> list[list[int]]:
    converter, template = _module("llamafactory.data.converter"), _module("llamafactory.data.template")
    names: dict[str, Any] = {
        "kto_tag": None, "ranking": ranking, "chosen": "chosen", "rejected": "rejected", "tools": None, "images": None,
        "videos": None, "audios": None, "load_from": "file", "role_tag": "from", "content_tag": "value",
        "user_tag": "human", "assistant_tag": "gpt", "observation_tag": "observation", "function_tag": "function_call",
        "system_tag": "system", **_MAPPINGS[kind],
    }  # fmt: skip
    if kind == "alpaca" and "system" in rows[0]:
        names |= {"system": "system", "history": "history"}
    names = {name: value for name, value in names.items() if value in (None, True, False) or name[-3:] == "tag"
             or name == "load_from" or value in rows[0]} | {
             name: None for name, value in names.items() if isinstance(value, str) and name[-3:] != "tag"
             and name != "load_from" and value not in rows[0]}  # fmt: skip
    which = "SharegptDatasetConverter" if kind == "sharegpt" else "AlpacaDatasetConverter"
    make = getattr(converter, which)(types.SimpleNamespace(**names), types.SimpleNamespace(media_dir="."))
    whole = template.parse_template(tokenizer)
    found = []
    for row in map(make, rows):
        sides = [[side] for side in row["_response"]]
        found.append(
            [
                sum(map(len, whole._encode(tokenizer, row["_prompt"] + side, row["_system"], row["_tools"])))
                for side in sides
            ]
        )
    return found


def llamafactory(kind: str, *, ranking: bool = False) -> Callable[..., list[int]]:
    """LLaMA-Factory's converters, and its template that it makes of the tokenizer's (`template: null`)."""

    def lengths(rows: Any, tokenizer: Any, folder: Path) -> list[int]:
        return [length for each in _llamafactory(rows, tokenizer, kind, ranking=ranking) for length in each]

    return lengths


def _module(name: str) -> Any:
    pytest.importorskip(name.partition(".")[0])
    return importlib.import_module(name)
