"""Files of fine-tuning: lengths are those that trainers train, or a refusal whose way out leads to these.

Expected lengths come from trainers' own code (`trainers.py`) or from transformers' templates. A case that names a
trainer is skipped where that trainer is not installed.
"""

from __future__ import annotations

import gzip
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tools.command import trainers
from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.documents import Documents, read_documents, wanted
from wlb_tools.command.output.console import progress

for package in ("pyarrow", "transformers", "tokenizers"):
    pytest.importorskip(package)

TRL, AXOLOTL, FACTORY = {"trainer": "trl"}, {"trainer": "axolotl"}, {"trainer": "llamafactory"}
FOX, DOG = "the quick brown fox jumps", "over the lazy dog, é"
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"animal": "fox", "number": 3}}}
OTHER = {"id": "c2", "type": "function", "function": {"name": "count", "arguments": {"what": "dogs"}}}
TEXT_CALL = {"type": "function", "function": {"name": "find", "arguments": json.dumps({"animal": "fox"})}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "looks " * 5, "parameters": {"type": "object",
     "properties": {key: {"type": "string"}}}}} for name, key in (("find", "animal"), ("count", "what"))
]  # fmt: skip


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "be brief"}
CHAT = [{"messages": [user(FOX), assistant(DOG)]}, {"messages": [SYSTEM, user(DOG), assistant(FOX), user("x" * 90)]}]
THOUGHTS = [{"messages": [user(FOX), assistant(DOG, reasoning_content="because " * 50)]}]
NULL = [{"messages": [user(FOX), assistant(tool_calls=[CALL]), {"role": "tool", "content": "3", "tool_call_id": "c1"},
                      assistant("three")], "tools": TOOLS}]  # fmt: skip
ABSENT = [{"messages": [user(FOX), {"role": "assistant", "tool_calls": [CALL]}, assistant("3")], "tools": TOOLS}]
EMPTY = [{"messages": [user(FOX), assistant("", tool_calls=[CALL, OTHER])], "tools": TOOLS}]
AS_TEXT = [{"messages": [user(FOX), assistant("", tool_calls=[TEXT_CALL])], "tools": json.dumps(TOOLS)}]
PARTS = [{"messages": [user([{"type": "text", "text": FOX}, {"type": "text", "text": DOG}]), assistant(DOG)]}]
SETTINGS = [{**THOUGHTS[0], "chat_template_kwargs": {"no_thoughts": True}}]
SHAREGPT = [
    {"conversations": [{"from": "human", "value": FOX}, {"from": "gpt", "value": DOG}] * 2, "system": "be brief"}
]
FUNCTION = [
    {"conversations": [{"from": "human", "value": FOX},
                       {"from": "function_call", "value": json.dumps({"name": "find", "arguments": {"animal": "fox"}})},
                       {"from": "observation", "value": "3"}, {"from": "gpt", "value": DOG}],
     "system": "be brief", "tools": json.dumps(TOOLS)}
]  # fmt: skip
ALPACA = [{"instruction": FOX, "input": "", "output": DOG}, {"instruction": DOG, "input": FOX * 3, "output": FOX}]
HISTORY = [{"instruction": FOX, "input": DOG, "output": DOG, "system": "be brief", "history": [[DOG, FOX], ["a", "b"]]}]
QUERY = [{"query": FOX, "response": DOG, "history": [[DOG, FOX]], "system": "be brief"}]
DOLLY = [{"instruction": FOX, "context": DOG, "response": DOG, "category": "open_qa"}]
PAIR = [{"prompt": FOX, "completion": DOG}, {"prompt": DOG, "completion": FOX * 9}]
PAIR_CHAT = [{"prompt": [SYSTEM, user(FOX)], "completion": [assistant(DOG)]}]
RESPONSE = [{"prompt": FOX, "response": DOG}]
TEXT = [{"text": FOX}, {"text": DOG * 3}]
PREFERENCE = [{"prompt": FOX, "chosen": DOG, "rejected": FOX * 3}]
PREFERENCE_CHAT = [{"prompt": [user(FOX)], "chosen": [assistant(DOG)], "rejected": [assistant(FOX * 3)]}]
IMPLICIT = [{"chosen": [user(FOX), assistant(DOG)], "rejected": [user(FOX), assistant(FOX * 3)]}]
FEEDBACK = [{"prompt": FOX, "prompt_id": "abc", "messages": IMPLICIT[0]["chosen"], **IMPLICIT[0], "score_chosen": 1.5}]
RANKING = [{"conversations": [{"from": "human", "value": FOX}], "chosen": {"from": "gpt", "value": DOG},
            "rejected": {"from": "gpt", "value": FOX * 3}}]  # fmt: skip
ALPACA_RANKING = [{"instruction": FOX, "input": DOG, "chosen": DOG, "rejected": FOX * 3}]
KTO = [{"prompt": FOX, "completion": DOG, "label": True}]
VERL = [{"data_source": "gsm8k", "prompt": [user(FOX)], "ability": "math", "extra_info": {"answer": "a" * 99},
         "reward_model": {"style": "rule", "ground_truth": "72"}}]  # fmt: skip
ROLLOUTS = [{"prompt": FOX, "completions": [DOG, FOX, "x"], "rewards": [0.0, 1.0, 0.5]}]
ROLLOUTS_CHAT = [{"prompt": [user(FOX)], "responses": [DOG, FOX]}]
TRAJECTORIES = [{"messages": [CHAT[0]["messages"], CHAT[1]["messages"]], "reward": 1.0}]


@dataclass
class Made:
    """What a case is checked against."""

    tokenizer: Any
    path: Path

    def chats(self, *messages: list[dict[str, Any]], tools: Any = None, **more: Any) -> list[int]:
        apply = self.tokenizer.apply_chat_template
        return [len(apply(each, tools=tools, return_dict=True, **more)["input_ids"]) for each in messages]

    def texts(self, *texts: str) -> list[int]:
        return [len(self.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]


@dataclass
class Case:
    """A kind of file."""

    name: str
    rows: Any  # or the bytes of the file
    expected: Callable[[Made], list[int]]
    options: dict[str, Any] = field(default_factory=dict)
    said: str = ""  # a note
    refused: str = ""  # the refusal of the file without `options`
    no_tokenizer: bool = False
    begins: bool = True  # the tokenizer puts a begin before texts
    writes: str = ".jsonl"


def by(oracle: Callable[..., list[int]], **more: Any) -> Callable[[Made], list[int]]:
    return lambda made: oracle(trainers.loaded(made.path), made.tokenizer, made.path.parent / "trained", **more)


def parquet(rows: list[dict[str, Any]]) -> bytes:
    datasets = pytest.importorskip("datasets")
    out = io.BytesIO()
    datasets.Dataset.from_list(rows).to_parquet(out)  # which fills keys that a message has not with null
    return out.getvalue()


def plain_parquet(**columns: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), out)
    return out.getvalue()


def csv(rows: list[dict[str, Any]]) -> bytes:
    import csv as library

    out = io.StringIO()
    writer = library.DictWriter(out, [*rows[0]])
    writer.writeheader()
    texts = [{name: value if isinstance(value, str | int) else json.dumps(value) for name, value in row.items()}
             for row in rows]  # fmt: skip
    writer.writerows(texts)
    return out.getvalue().encode()


def npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def fixed(*lengths: int) -> Callable[[Made], list[int]]:
    return lambda made: [*lengths]


OLD = [{"input": FOX, "output": DOG, "score": 1.0, "step": 3}]
PADDED = {"input_ids": [[1, 2, 3, 0, 0], [4, 5, 0, 0, 0]], "attention_mask": [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]}
TEMPLATE_NOTE = "as the chat template of tokenizer writes them"


rendered = by(trainers.by_template)


CASES = [
    # Conversations.
    Case("messages", CHAT, rendered, said=TEMPLATE_NOTE),
    Case("messages, TRL", CHAT, by(trainers.trl_sft), TRL, said="by the rule of TRL"),
    Case("messages, axolotl", CHAT, by(trainers.axolotl_chat), AXOLOTL, said="by the rule of axolotl"),
    Case("messages, gzip", gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in CHAT)),
         lambda made: made.chats(*(row["messages"] for row in CHAT)), writes=".jsonl.gz"),
    Case("messages, parquet", lambda: parquet(CHAT), rendered, writes=".parquet"),
    Case("thoughts", THOUGHTS, rendered),
    Case("thoughts, TRL", THOUGHTS, by(trainers.trl_sft), TRL),
    Case("settings of the template", SETTINGS, by(trainers.trl_sft), TRL),
    Case("content null and calls of tools", NULL, rendered),
    Case("content null and calls of tools, TRL", NULL, by(trainers.trl_sft), TRL),
    Case("content null and calls of tools, axolotl", NULL, by(trainers.axolotl_chat), AXOLOTL),
    Case("calls of tools, parquet", lambda: parquet(NULL), rendered, writes=".parquet"),
    Case("content absent and calls of tools", ABSENT, rendered),
    Case("content empty and calls of tools", EMPTY, rendered),
    Case("tools as text, TRL", AS_TEXT, by(trainers.trl_sft), TRL),
    Case("tools and arguments as text, axolotl", AS_TEXT, by(trainers.axolotl_chat), AXOLOTL),
    Case("tools, LLaMA-Factory", NULL, rendered, {}, refused="LLaMA-Factory writes tools and their calls by templates"),
    Case("content in parts", PARTS, lambda made: made.chats([user(FOX + DOG), assistant(DOG)])),
    Case("content in parts, TRL", PARTS, lambda made: made.chats([user(FOX + DOG), assistant(DOG)]), {},
         refused="which TRL does not join: join them"),
    Case("messages as text in csv", lambda: csv(CHAT[:1]), lambda made: made.chats(CHAT[0]["messages"]), writes=".csv"),
    Case("an object over several lines", json.dumps(NULL[0], indent=2).encode(),
         lambda made: made.chats(NULL[0]["messages"], tools=TOOLS), writes=".json"),
    Case("an object with an array of rows", json.dumps({"version": 1, "rows": CHAT}, indent=1).encode(),
         lambda made: made.chats(*(row["messages"] for row in CHAT)), writes=".json", said="Its rows are those of"),
    Case("ShareGPT", SHAREGPT, lambda made: made.chats(
        [SYSTEM, *(user(FOX), assistant(DOG)) * 2])),
    Case("ShareGPT, axolotl", SHAREGPT, by(trainers.axolotl_chat, messages="conversations"), AXOLOTL),
    Case("ShareGPT, LLaMA-Factory", SHAREGPT, by(trainers.llamafactory("sharegpt")), FACTORY),
    Case("ShareGPT, TRL", SHAREGPT, by(trainers.trl_sft), TRL, said="Not counted: 'system'"),
    Case("ShareGPT with tools", FUNCTION, lambda made: made.chats(
        [SYSTEM, user(FOX), assistant("", tool_calls=[{"type": "function", "function": {
            "name": "find", "arguments": {"animal": "fox"}}}]), {"role": "tool", "content": "3"}, assistant(DOG)],
        tools=TOOLS)),
    Case("nested rollouts", TRAJECTORIES, lambda made: made.chats(*(row["messages"] for row in CHAT))),
    # Instructions.
    Case("Alpaca", ALPACA, lambda made: made.chats(
        [user(FOX), assistant(DOG)], [user(f"{DOG}\n{FOX * 3}"), assistant(FOX)])),
    Case("Alpaca, LLaMA-Factory", ALPACA, by(trainers.llamafactory("alpaca")), FACTORY),
    Case("Alpaca, axolotl", ALPACA, by(trainers.axolotl_alpaca), AXOLOTL, said="axolotl's prompt of type: alpaca"),
    Case("Alpaca, TRL", ALPACA, by(trainers.axolotl_alpaca), AXOLOTL, refused="TRL takes no instruction and output"),
    Case("Alpaca with system and history", HISTORY, by(trainers.llamafactory("alpaca")), FACTORY),
    Case("query, response, history", QUERY, by(trainers.llamafactory("query")), begins=False),
    Case("instruction, context, response", DOLLY, lambda made: made.chats([user(f"{FOX}\n{DOG}"), assistant(DOG)])),
    # Prompts and completions.
    Case("prompt and completion", PAIR, lambda made: made.texts(FOX + DOG, DOG + FOX * 9)),
    Case("prompt and completion, TRL", PAIR, by(trainers.trl_sft), TRL, said="an end of text, by the rule of TRL"),
    Case("prompt and completion as messages", PAIR_CHAT, by(trainers.trl_sft)),
    Case("prompt and response, LLaMA-Factory", RESPONSE, by(trainers.llamafactory("pair")), FACTORY),
    Case("prompt and completion with system", [{**PAIR[0], "system": "be brief", "tools": TOOLS}],
         lambda made: made.texts(FOX + DOG), said="Not counted: 'system', 'tools'"),
    Case("input and output with a score", OLD, lambda made: made.texts(FOX + DOG)),
    Case("text, TRL", TEXT, by(trainers.trl_sft), TRL),
    Case("text, axolotl", TEXT, by(trainers.axolotl_text), AXOLOTL),
    Case("text beside objects of many shapes",
         [{"text": FOX, "meta": {"a": 1}}, {"text": DOG, "meta": {"b": ["c"]}}], lambda made: made.texts(FOX, DOG)),
    Case("texts in the form of dates", [{"text": "2020-01-01"}] * 3, lambda made: made.texts(*["2020-01-01"] * 3)),
    # Preferences.
    Case("preference of text, TRL", PREFERENCE, by(trainers.trl_dpo), TRL, said="two documents"),
    Case("preference of messages", PREFERENCE_CHAT, by(trainers.trl_dpo), said="two documents"),
    Case("preference with the prompt inside", IMPLICIT, by(trainers.trl_reward)),
    Case("preference with the prompt twice", FEEDBACK, lambda made: made.chats(*IMPLICIT[0].values())),
    Case("preference, LLaMA-Factory", RANKING, by(trainers.llamafactory("sharegpt", ranking=True)), FACTORY),
    Case("preference of instructions", ALPACA_RANKING, by(trainers.llamafactory("alpaca", ranking=True)), begins=False),
    Case("preference of token ids", [{"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5, 6]}],
         fixed(3, 5), no_tokenizer=True),
    Case("KTO", KTO, by(trainers.trl_sft), TRL),
    # Prompts and rollouts.
    Case("prompts", [{"prompt": FOX}], lambda made: made.texts(FOX), said="prompts alone"),
    Case("prompts of verl", VERL, lambda made: made.chats(VERL[0]["prompt"], add_generation_prompt=True),
         said="prompts alone"),
    Case("rollouts", ROLLOUTS, lambda made: made.texts(*(FOX + each for each in ROLLOUTS[0]["completions"])),
         said="Each answer of a row is a document"),
    Case("rollouts of messages", ROLLOUTS_CHAT, lambda made: made.chats(
        [user(FOX), assistant(DOG)], [user(FOX), assistant(FOX)])),
    Case("rollouts of token ids", [{"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "logprobs": [0.1, 0.2, 0.3]}],
         fixed(5), no_tokenizer=True),
    # Token ids and numbers.
    Case("padded token ids", lambda: plain_parquet(**PADDED), fixed(3, 2), no_tokenizer=True, writes=".parquet"),
    Case("padded token ids, jsonl", [dict(zip(PADDED, row, strict=True)) for row in zip(*PADDED.values(), strict=True)],
         fixed(3, 2), no_tokenizer=True),
    Case("packed token ids", lambda: plain_parquet(input_ids=[[1, 2, 3, 4], [5]], seq_lengths=[[3, 1], [1]]),
         fixed(3, 1, 1), no_tokenizer=True, writes=".parquet"),
    Case("total_tokens of a csv", b"id,total_tokens\na,150\nb,7\n", fixed(150, 7), {"field": "total_tokens"},
         no_tokenizer=True, writes=".csv"),
    Case("total_tokens of a csv, found", b"id,total_tokens\na,150\nb,7\n", fixed(150, 7), no_tokenizer=True,
         writes=".csv"),
    Case("a histogram", b"length,count\n5,2\n7,1\n", fixed(5, 5, 7), no_tokenizer=True, writes=".csv",
         said="how many documents have a length"),
    Case("a histogram without header", b"5,2\n7,1\n", fixed(5, 5, 7), {"holds": "lengths"}, refused="has no header",
         no_tokenizer=True, writes=".csv"),
    Case("a histogram of arrays", npz(length=np.array([5, 7]), count=np.array([2, 1])), fixed(5, 5, 7),
         no_tokenizer=True, writes=".npz"),
    Case("numbers of tokens beside text", [{"text": FOX, "num_tokens": 3}], lambda made: made.texts(FOX)),
    Case("lengths said to be so", [{"text": FOX, "num_tokens": 3}], fixed(3), {"holds": "lengths"}, no_tokenizer=True),
    # What is not counted is named.
    Case("a column of text beside", [{"text": FOX, "explanation": DOG}], lambda made: made.texts(FOX),
         said="Not counted: 'explanation'"),
    Case("a key that the template leaves out", [{"messages": [user(FOX) | {"mood": "glad"}, assistant(DOG)]}], rendered,
         said="does not write 'mood' of messages"),
    Case("images without a processor", [{"messages": CHAT[0]["messages"], "images": ["a.png"]}],
         lambda made: made.chats(CHAT[0]["messages"]), {"field": "messages"}, refused="model's processor counts"),
    *(Case(f"{kind} beside text", [{"text": FOX, kind: value}], lambda made: made.texts(FOX), {"field": "text"},
           refused=f"column '{kind}' holds {kind}, whose tokens the model's processor counts")
      for kind, value in (("image", "a.png"), ("audio", {"path": "a.wav", "bytes": None}), ("video", "a.mp4"))),
    Case("images beside a prompt and completion", [{**PAIR[0], "images": ["a.png"]}],
         lambda made: made.texts(FOX + DOG), {"field": "prompt,completion"}, refused="column 'images' holds image"),
    Case("images beside text, parquet", lambda: plain_parquet(text=[FOX], image=["a.png"]),
         lambda made: made.texts(FOX), {"field": "text"}, refused="column 'image' holds image", writes=".parquet"),
    Case("flags of images beside text, parquet", lambda: plain_parquet(text=[FOX, DOG], image=[0, 3]),
         lambda made: made.texts(FOX, DOG), writes=".parquet"),
    Case("images in parts", [{"messages": [user([{"type": "image", "image": "a.png"}]), assistant(DOG)], "said": FOX}],
         lambda made: made.texts(FOX), {"field": "said"}, refused="holds image, whose tokens"),
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Any, Path]]:
    """Tokenizers that begin texts with a token, and that do not."""
    folders = {begins: tmp_path_factory.mktemp(f"begins{begins}") / "tokenizer" for begins in (True, False)}
    return {begins: (trainers.save_tokenizer(folder, begins=begins), folder) for begins, folder in folders.items()}


def read(path: Path, **options: Any) -> Documents:
    with progress(quiet=True) as bars:
        return read_documents([str(path)], wanted=wanted(**options), pattern=None, cache=None, progress=bars)


def written(case: Case, folder: Path) -> Path:
    path = folder / f"file{case.writes}"
    rows = case.rows() if callable(case.rows) else case.rows
    content = rows if isinstance(rows, bytes) else b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_lengths_are_those_that_are_trained(case: Case, saved: dict[bool, tuple[Any, Path]], tmp_path: Path) -> None:
    auto, folder = saved[case.options != FACTORY and case.begins]
    path = written(case, tmp_path)
    whole = {} if case.no_tokenizer else {"tokenizer": folder}
    if case.refused:
        first = next((of for of in (TRL, FACTORY) if ("TRL" if of is TRL else "LLaMA") in case.name), {})
        with pytest.raises(CliError, match=case.refused) as caught:
            read(path, **whole, **first)
        said = str(caught.value)
        assert path.name in said
        for name, value in case.options.items():  # the way out is in the refusal, option by option
            if name == "trainer" and f"--trainer {value}" not in said:
                assert re.search(rf"--trainer (\w+, |\w+ or )*{value}", said), said
            elif name != "trainer":
                assert (f"--{value}" if name == "holds" else f"--{name}") in said, said
    found = read(path, **whole, **case.options)
    assert found.lengths.tolist() == case.expected(Made(auto, path))
    assert case.said in " ".join(found.notes)
    assert found.unit == "tokens"


def test_there_are_as_many_kinds_as_promised() -> None:
    assert len({case.name.partition(",")[0] for case in CASES}) >= 45


WRONG = [
    ("instruction with input", ALPACA[1:], len((DOG + "\n" + FOX * 3 + FOX).encode())),
    ("thoughts", THOUGHTS, len((FOX + DOG + "because " * 50).encode())),
    ("calls and tools", EMPTY, len((FOX + json.dumps([CALL, OTHER]) + json.dumps(TOOLS)).encode())),
    ("tools", [{**CHAT[0], "tools": TOOLS}], len((FOX + DOG + json.dumps(TOOLS)).encode())),
    ("system and tools", FUNCTION[:1], None),
    (
        "system and tools beside a pair",
        [{**PAIR[0], "system": "be brief", "tools": TOOLS}],
        len((FOX + DOG + "be brief" + json.dumps(TOOLS)).encode()),
    ),
]


@pytest.mark.parametrize(("name", "rows", "size"), WRONG, ids=[name for name, *_ in WRONG])
def test_without_a_tokenizer_every_text_of_a_row_counts(name: str, rows: Any, size: int | None, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read(path)
    assert found.unit == "bytes"
    if size is not None:
        assert found.lengths.tolist() == [size]
    else:
        assert found.lengths[0] > len(json.dumps(TOOLS)) + len(FOX + "be brief")
    assert ("without a chat template" in " ".join(found.notes)) == (name != "no tools beside a pair")


def test_images_beside_text_are_refused_in_bytes_too(tmp_path: Path) -> None:
    path = tmp_path / "file.parquet"
    path.write_bytes(plain_parquet(text=["abc", "de"], image=["a/b.png", "c.png"]))
    with pytest.raises(CliError, match=r"file\.parquet: row 0: column 'image' holds image"):
        read(path)
    assert read(path, field="text").lengths.tolist() == [3, 2]
