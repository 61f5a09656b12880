"""Reads a row of a data set as documents: token ids, text, conversations, preference pairs, rollouts.

Files of fine-tuning say what a row holds only by the names of its columns. This module knows the names, for the
loaders, for the trainers that wlb drives, and for the `wlb` command. It changes no text: what a trainer makes of a
document (a chat template, an end of text) is up to the trainer's rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal[
    "tokens", "preference", "pair", "instruction", "rollouts", "chat", "text", "prompt", "histogram", "lengths"
]

MASKS: Final = ("loss_mask", "completion_mask", "assistant_masks")
"""Columns that mark the tokens to learn."""

WITHOUT_EFFECT: Final = frozenset(
    [
        "length",
        "num_tokens",
        "special_tokens_mask",
        "offset_mapping",
        "__index_level_0__",
        "use_cache",
        "num_items_in_batch",
        "max_length_q",
        "max_length_k",
    ]
)
"""Columns beside token ids that do not change what is learnt."""

LENGTHS: Final = (
    "length", "lengths", "num_tokens", "n_tokens", "total_tokens", "token_count", "seq_len", "seqlen", "seq_length",
)  # fmt: skip
_COUNTS: Final = ("count", "counts", "frequency", "freq", "num_documents")
_TOKENS: Final = ("input_ids", "tokens", "token_ids")
_TEXTS: Final = ("text", "content", "document", "body")
_CHATS: Final = ("messages", "conversations", "conversation", "trajectory")
_PROMPTS: Final = ("prompt", "question", "query", "problem", "input")

Parts = dict[str, tuple[str, ...]]
_KINDS: Final[tuple[tuple[Kind, Parts], ...]] = (
    ("tokens", {"tokens": _TOKENS}),
    ("preference", {
        "chosen": ("chosen", "chosen_ids", "chosen_input_ids"),
        "rejected": ("rejected", "rejected_ids", "rejected_input_ids"),
    }),
    ("instruction", {"instruction": ("instruction",), "answer": ("output", "response", "completion")}),
    ("instruction", {"instruction": ("query",), "answer": ("response",)}),
    ("tokens", {"prompt": ("prompt_ids",), "answer": ("completion_ids", "response_ids")}),
    ("pair", {"prompt": _PROMPTS, "answer": ("completion", "response", "answer", "output")}),
    ("rollouts", {"prompt": (*_PROMPTS, "prompt_ids"), "answers": ("completions", "responses", "outputs", "rollouts")}),
    ("chat", {"messages": _CHATS}),
    ("text", {"text": _TEXTS}),
    ("prompt", {"prompt": (*_PROMPTS[:-1], "instruction")}),
    ("histogram", {"lengths": LENGTHS, "counts": _COUNTS}),
    ("lengths", {"lengths": LENGTHS}),
)  # fmt: skip
"""Kinds of rows in the order in which they are tried, each with the columns that it needs."""

_MEDIA: Final[Parts] = {"image": ("images", "image"), "audio": ("audios", "audio"), "video": ("videos", "video")}
_TURNS: Final[Parts] = {
    "system": ("system", "system_prompt"), "tools": ("tools",), "settings": ("chat_template_kwargs",), **_MEDIA,
}  # fmt: skip
_FURTHER: Final[dict[Kind, Parts]] = {
    "tokens": {"mask": ("attention_mask",), "parts": ("seq_lengths",)},
    "preference": {
        "prompt": ("prompt", "prompt_ids", "prompt_input_ids", "question", "query"), "instruction": ("instruction",),
        "input": ("input", "context"), "history": ("history",), "messages": _CHATS, **_TURNS,
    },
    "instruction": {"input": ("input", "context"), "history": ("history",), **_TURNS},
    "pair": _TURNS, "rollouts": _TURNS, "chat": _TURNS, "prompt": _TURNS, "text": _MEDIA,
}  # fmt: skip
"""Columns that a kind of row may also have."""

_SILENT: Final = frozenset(
    (
        *("id", "uid", "uuid", "idx", "index", "index_level", "prompt_id", "hash", "key", "source", "data_source"),
        *(
            "dataset",
            "origin",
            "url",
            "uri",
            "path",
            "file",
            "filename",
            "repo",
            "license",
            "split",
            "lang",
            "language",
        ),
        *("label", "labels", "score", "scores", "rating", "timestamp", "date", "created", "created_at", "meta"),
        *("metadata", "category", "task", "type", "ability", "reward_model", "reward", "extra_info", "agent_name"),
        *("finish_reason", "model"),
    )
)
"""Columns that say where a row comes from, or how good it is; no trainer learns their text."""


def is_length_name(name: str) -> bool:
    """Whether a name says that its numbers are lengths in tokens, such as `total_tokens`."""
    return re.fullmatch(r"(\w+_)?(len|lengths?|seq_?lens?|tokens|tokens?_counts?)", name.lower()) is not None


@dataclass(frozen=True)
class Reading:
    """The kind of the rows of a data set, and the columns with their parts.

    Attributes:
        kind: what a row is.
        columns: column of each part, such as {"messages": "conversations", "tools": "tools"}.
        several: columns whose texts or token ids are joined, if the user named them; else ().
    """

    kind: Kind
    columns: Mapping[str, str]
    several: tuple[str, ...] = ()

    @property
    def media(self) -> tuple[str, ...]:
        """Columns with images, recordings or films."""
        return tuple(name for part, name in self.columns.items() if part in _MEDIA)

    @property
    def names(self) -> tuple[str, ...]:
        """All columns that are read."""
        return tuple(dict.fromkeys((*self.columns.values(), *self.several)))

    def unread(self, names: Sequence[str]) -> list[str]:
        """Columns that are not read, and are not known to carry no text."""
        known = {*self.names, *MASKS, *WITHOUT_EFFECT, *_SILENT}
        if self.kind == "tokens":
            return []  # text beside token ids is what they were made of
        return [name for name in names if name not in known and not is_length_name(name)]


def reading_of(names: Sequence[str], kinds: Sequence[Kind] | None = None) -> Reading | None:
    """How rows with these columns are read; None if no kind of row has them.

    Args:
        names: the columns.
        kinds: kinds that are possible; by default all.

    Complexity:
        O(names), constant otherwise.
    """
    there = {*names}
    for kind, needed in _KINDS:
        if kinds is not None and kind not in kinds:
            continue
        found = {part: next((name for name in known if name in there), "") for part, known in needed.items()}
        if all(found.values()) and len({*found.values()}) == len(found):
            return Reading(kind, found | _further(kind, there - {*found.values()}))
    return None


def reading_of_columns(chosen: Sequence[str], names: Sequence[str]) -> Reading:
    """How rows are read whose documents the user says are in the columns `chosen`.

    Several that make a kind of row together, such as prompt and completion, are read as that; others are joined.
    """
    one = reading_of(chosen)
    if one is not None and {*chosen} <= {*one.names}:
        return one
    there = {*names} - {*chosen}
    return Reading(
        "text", {part: name for part, name in _further("chat", there).items() if part == "tools"}, tuple(chosen)
    )


def _further(kind: Kind, there: set[str]) -> dict[str, str]:
    known = _FURTHER.get(kind, {})
    return {part: name for part, of in known.items() for name in of if name in there and name == _first(of, there)}


def _first(known: Sequence[str], there: set[str]) -> str:
    return next((name for name in known if name in there), "")


def advice(names: Sequence[str]) -> str:
    """What to do with rows of these columns, for the error of a reader that needs `input_ids`."""
    found = reading_of(names)
    if found is None or found.kind in ("tokens", "histogram", "lengths"):
        return "tokenise it first"
    if found.kind == "text":
        return f"its {found.columns['text']!r} is text: tokenise it first"
    if found.kind == "preference":
        return "its rows are preference pairs, two sequences that are trained together: give it to a trainer of these"
    if found.kind == "chat":
        name = found.columns["messages"]
        return f"its {name!r} are conversations: tokenise them with tokenizer.apply_chat_template first"
    return f"its rows are of {' and '.join(map(repr, found.names))}: tokenise them first, as your trainer does"


# Lengths of rows of token ids.


def masked_lengths(column: Any) -> NDArray[np.int64]:
    """int64 [rows]: tokens that an attention mask shows, without padding; 0 where a row has none.

    Args:
        column: an array of Arrow, or several one after the other: lists of 0 or 1, one for each token.
    """
    found = [np.empty(0, np.int64)]
    for chunk in column.chunks if hasattr(column, "chunks") else [column]:
        shown = chunk.values.fill_null(0).to_numpy(zero_copy_only=False) != 0
        sums = np.concatenate([[0], np.cumsum(shown, dtype=np.int64)])
        found.append(np.diff(sums[chunk.offsets.to_numpy()]))
    return np.concatenate(found)


# Documents of rows with text.

Message = dict[str, Any]


@dataclass(frozen=True)
class Tokens:
    """A document of token ids, of which only the number counts."""

    count: int


@dataclass(frozen=True)
class Text:
    """A document of text.

    Attributes:
        text: all of it.
        open: it is a prompt, which a model shall answer.
        beside: texts that only a conversation can take, such as a system prompt, by their columns.
    """

    text: str
    open: bool = False
    beside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Chat:
    """A document of messages, as a chat template takes them.

    Attributes:
        messages: each with a role, and whatever else the row has.
        tools: descriptions of tools, or None.
        settings: further arguments of the template.
        open: it ends with a prompt, which a model shall answer.
        instruction: instruction, input, answer and system prompt, if the row has these; trainers that have a prompt of
            their own for them do not use the template.
        media: images, recordings and films in their order, by kind.
    """

    messages: list[Message]
    tools: Any = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    open: bool = False
    instruction: tuple[str, str, str, str] | None = None
    media: Mapping[str, list[Any]] = field(default_factory=dict)


Made = Text | Chat | Tokens

ROLES: Final = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "observation": "tool", "model": "assistant",
}  # fmt: skip
"""Names of roles in ShareGPT's files, and the roles that chat templates know."""


def documents(row: Mapping[str, Any], reading: Reading, *, rename: bool = True, turns: bool = False) -> list[Made]:
    """The documents of a row.

    Args:
        row: values by column.
        reading: of the data set.
        rename: turn ShareGPT's names of roles into those of templates, and a system prompt beside a conversation into
            its first message; False for trainers that do neither.
        turns: a prompt and its answer of text are messages, not one text.

    Returns:
        One document; two for a preference pair (chosen, then rejected); one for each rollout.

    Raises:
        ValueError: a value is missing, or of another type; says which column, and what it may be.
    """
    if reading.several:
        return [_joined(row, reading.several, _of(row, reading, "tools"), rename)]
    return _MAKERS[reading.kind](_Row(row, reading, rename, turns))


class _Row:
    """The parts of one row."""

    def __init__(self, row: Mapping[str, Any], reading: Reading, rename: bool, turns: bool) -> None:
        self.row, self.reading, self.rename, self.turns = row, reading, rename, turns

    def need(self, part: str) -> Any:
        value = self.get(part)
        if value is None:
            raise ValueError(f"nothing in column {self.reading.columns[part]!r} (null)")
        return value

    def get(self, part: str) -> Any:
        return _of(self.row, self.reading, part)

    def text(self, part: str) -> str:
        value = self.get(part)
        if value is None or isinstance(value, str):
            return value or ""
        raise ValueError(f"column {self.reading.columns[part]!r} holds {type(value).__name__}: must be text")

    def chat(self, messages: list[Message], **more: Any) -> Chat:
        """A conversation with all that the row says beside it."""
        system = self.text("system") if self.rename else ""
        if system and not (messages and messages[0].get("role") == "system"):
            messages = [{"role": "system", "content": system}, *messages]
        media = {kind: _listed(self.get(kind)) for kind in _MEDIA if self.get(kind) is not None}
        return Chat(messages, _json(self.get("tools")), _json(self.get("settings")) or {}, media=media, **more)

    def plain(self, text: str, *, open: bool = False) -> Text:
        """A text, with what the row has beside it; images have no place in it."""
        for kind in _MEDIA:
            if self.get(kind) and not isinstance(self.get(kind), int | float):  # which may be flags or counts
                columns = self.reading.columns
                raise ValueError(
                    f"column {columns[kind]!r} holds {kind}, whose tokens the model's processor counts where"
                    f" messages say its place; to count the text alone, --field with the column of the text"
                )
        beside = {part: self.get(part) for part in ("system", "tools") if self.get(part) not in (None, "", [], "[]")}
        said = {
            self.reading.columns[part]: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for part, value in beside.items()
        }
        return Text(text, open, said)

    def turn(self, instruction: str, *, answers: bool = True) -> list[Message]:
        """The messages before an answer, of an instruction with its input and earlier turns."""
        said = []
        for turn in _json(self.get("history")) or []:
            if not isinstance(turn, Sequence) or isinstance(turn, str) or len(turn) != 2:
                raise ValueError(f"column {self.reading.columns['history']!r}: each turn must be [question, answer]")
            said += [_message("user", turn[0]), _message("assistant", turn[1])]
        return [*said, _message("user", "\n".join(each for each in (instruction, self.text("input")) if each))]


def _of(row: Mapping[str, Any], reading: Reading, part: str) -> Any:
    name = reading.columns.get(part)
    return None if name is None else row.get(name)


def _message(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else [value]


def _json(value: Any) -> Any:
    """A value, or what it says as JSON, since files of columns have nested values as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except ValueError:
        raise ValueError(f"{value[:40]!r} is not JSON") from None


def is_messages(value: Any) -> bool:
    """Whether a value is a conversation: messages, or text of JSON with messages."""
    if isinstance(value, str):
        return value.lstrip()[:2] in ("[{", "[]") and is_messages(_tried(value))
    if not isinstance(value, list) or not value:
        return isinstance(value, list)
    first = _tried(value[0]) if isinstance(value[0], str) else value[0]
    return isinstance(first, Mapping) and bool("role" in first or "from" in first)


def _tried(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return None


def conversation(value: Any, *, rename: bool) -> list[Message]:
    """Messages with `role` and `content`, and their other keys as they are.

    Raises:
        ValueError: it is no list of messages; names the first that is none.
    """
    value = _json(value)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        raise ValueError(f"holds {type(value).__name__}: must be a list of messages")
    made = []
    for message in map(_json, value):
        if not isinstance(message, Mapping):
            raise ValueError(f"a message must be an object with role and content: {message!r:.80}")
        said = dict(message)
        for old, new in (("from", "role"), ("value", "content")):
            if old in said and new not in said:
                said[new] = said.pop(old)
        if not isinstance(said.get("role"), str):
            raise ValueError(f"a message without a role: {message!r:.80}")
        if rename:
            said = _renamed(said)
        made.append(said)
    return made


def _renamed(message: Message) -> Message:
    if message["role"] == "function_call":
        call = _tried(message["content"]) if isinstance(message.get("content"), str) else None
        if isinstance(call, Mapping) and "name" in call:
            calls = [{"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}]
            return {"role": "assistant", "content": "", "tool_calls": calls}
    return message | {"role": ROLES.get(message["role"], message["role"])}


def _is_ids(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (isinstance(value, list) and bool(value) and type(value[0]) is int)


def _sequence(row: _Row, before: Any, after: Any) -> Made:
    """A prompt and what follows it, of one type: text, messages or token ids."""
    if _is_ids(before) or _is_ids(after):
        return Tokens(len(before or ()) + len(after or ()))
    if is_messages(after) or is_messages(before) or isinstance(after, Mapping) or (row.turns and before):
        said = conversation(before, rename=row.rename) if is_messages(before) and before else []
        if isinstance(before, str) and not is_messages(before) and before:
            said = [_message("user", before)]
        return row.chat([*said, *(_answer(after, row) if after else [])], open=not after)
    for value in (before, after):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"holds {type(value).__name__} where text, messages or token ids must be: {value!r:.60}")
    return row.plain((before or "") + (after or ""), open=after is None)


def _answer(value: Any, row: _Row) -> list[Message]:
    if isinstance(value, str) and not is_messages(value):
        return [_message("assistant", value)]
    return conversation(value, rename=row.rename)


def _tokens(row: _Row) -> list[Made]:
    if "prompt" in row.reading.columns:
        return [_sequence(row, row.need("prompt"), row.need("answer"))]
    ids, mask, parts = row.need("tokens"), row.get("mask"), row.get("parts")
    if isinstance(ids, str) or not hasattr(ids, "__len__"):
        name = row.reading.columns["tokens"]
        raise ValueError(f"column {name!r} holds {type(ids).__name__}: must be token ids; another column: --field")
    if parts is not None:
        return [Tokens(int(each)) for each in parts]
    return [Tokens(len(ids) if mask is None else int(np.count_nonzero(mask)))]


def _preference(row: _Row) -> list[Made]:
    before: Any = row.get("prompt")
    sides = [row.need("chosen"), row.need("rejected")]
    if (instruction := row.text("instruction")) or (row.get("history") is not None or row.text("input")):
        before = row.turn(instruction or row.text("prompt"))
    elif row.get("messages") is not None and not _is_whole(sides[0]):
        before = conversation(row.get("messages"), rename=row.rename)
    if isinstance(before, list) and before and isinstance(before[0], Mapping):
        return [row.chat([*conversation(before, rename=row.rename), *_answer(side, row)]) for side in sides]
    if isinstance(before, str) and _is_whole(sides[0]):
        before = None  # the prompt stands once more, as first message of both sides
    return [_sequence(row, before, side) for side in sides]


def _is_whole(side: Any) -> bool:
    """Whether a side of a pair has its prompt: its first message is not the assistant's."""
    if not is_messages(side) or not side:
        return False
    return bool(conversation(side, rename=True)[0]["role"] != "assistant")


def _instruction(row: _Row) -> list[Made]:
    answer = row.need("answer")
    if not isinstance(answer, str) or not isinstance(row.need("instruction"), str):
        return [_sequence(row, row.need("instruction"), answer)]
    instruction = row.text("instruction")
    said = [*row.turn(instruction), _message("assistant", answer)]
    return [row.chat(said, instruction=(instruction, row.text("input"), answer, row.text("system")))]


def _pair(row: _Row) -> list[Made]:
    return [_sequence(row, row.need("prompt"), row.need("answer"))]


def _rollouts(row: _Row) -> list[Made]:
    prompt, answers = row.need("prompt"), _json(row.need("answers"))
    if not isinstance(answers, list):
        raise ValueError(f"column {row.reading.columns['answers']!r} must have a list of answers")
    if _is_ids(answers) or (is_messages(answers) and answers):
        return [_sequence(row, prompt, answers)]
    texts = [each.get("text", each.get("content")) if isinstance(each, Mapping) else each for each in answers]
    return [_sequence(row, prompt, each) for each in texts]


def _chat(row: _Row) -> list[Made]:
    value = _json(row.need("messages"))
    nested = isinstance(value, list) and value and all(isinstance(each, list) for each in value)
    return [row.chat(conversation(each, rename=row.rename)) for each in (value if nested else [value])]


def _text(row: _Row) -> list[Made]:
    made = _joined(row.row, (row.reading.columns["text"],), None, row.rename)
    if isinstance(made, Chat):
        return [row.chat(made.messages)]
    return [row.plain(made.text) if isinstance(made, Text) else made]


def _prompt(row: _Row) -> list[Made]:
    value = row.need("prompt")
    return [_sequence(row, value, None)]


def _joined(row: Mapping[str, Any], names: Sequence[str], tools: Any, rename: bool) -> Made:
    values: list[Any] = [row.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if value is None:
            raise ValueError(f"nothing in column {name!r} (null)")
    if all(isinstance(value, str) for value in values):
        return Text("".join(values))
    if all(_is_ids(value) or value == [] for value in values):
        return Tokens(sum(map(len, values)))
    if len(values) == 1 and is_messages(values[0]):
        return Chat(conversation(values[0], rename=rename), _json(tools))
    kinds = ", ".join(dict.fromkeys(type(value).__name__ for value in values))
    raise ValueError(f"{', '.join(map(repr, names))} hold {kinds}: must be text, token ids or messages, all the same")


_MAKERS: Final[dict[Kind, Callable[[_Row], list[Made]]]] = {
    "tokens": _tokens, "preference": _preference, "instruction": _instruction, "pair": _pair, "rollouts": _rollouts,
    "chat": _chat, "text": _text, "prompt": _prompt,
}  # fmt: skip
