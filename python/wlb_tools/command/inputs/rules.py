"""Rules by which trainers make token sequences of documents: chat templates, ends of text, prompts of their own.

- No trainer: text as it is. Conversations by the tokenizer's chat template, with the row's system prompt and tools;
  ShareGPT's roles are renamed. Instruction, input and output are a conversation.
- `trl`: text with special tokens and end of text. Conversations by the template, the row as it is. Instruction and
  output are refused, as TRL does.
- `axolotl`: text as with `trl`. Conversations by the template, without null, arguments of tools parsed. Instruction,
  input and output in its Alpaca prompt.
- `llamafactory`: text with end of text. Conversations by the template, without tools. Instruction, input and output,
  and a prompt with its answer, are a conversation.

Sources: `SFTTrainer._prepare_dataset` of TRL, `ChatTemplateStrategy` and `AlpacaPrompter` of axolotl, `converter` and
`SupervisedDatasetProcessor` of LLaMA-Factory. Templates run in transformers' sandbox.
"""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wlb.reading.row_kinds import Chat, Message, Text
from wlb_tools.command.inputs.tokenizers import Tokenizer

_SILENT = frozenset(("role", "id", "tool_call_id", "train", "training", "weight", "loss", "type", "index"))
"""Keys of messages whose values are no text that is learnt."""

_ALPACA = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a"
    " response that appropriately completes the request.\n\n### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n",
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{}\n\n### Response:\n",
)
"""axolotl's prompt of `type: alpaca`, with an input and without."""


class Rule:
    """What a trainer makes of a document.

    Args:
        tokenizer: counts tokens, and has the template; None: bytes of every text are counted.
        trainer: name of the trainer; None: the rule of no trainer.

    Attributes:
        rename: whether ShareGPT's roles and a system prompt beside a conversation become the template's.
        turns: whether a prompt and its answer of text become a conversation.
    """

    def __init__(self, tokenizer: Tokenizer | None, trainer: str | None) -> None:
        self._tokenizer, self._trainer = tokenizer, trainer if trainer in _NAMES else None
        self.rename, self.turns = self._trainer != "trl", self._trainer == "llamafactory"
        self._ignored: dict[str, None] = {}
        self._used = ""

    @property
    def plain(self) -> bool:
        """Whether a document of text is its text, with nothing added."""
        return self._trainer is None or self._tokenizer is None

    def pieces(self, made: Text | Chat) -> tuple[list[str], int]:
        """Texts that are tokenised one by one, and how many tokens come on top.

        Raises:
            ValueError: the trainer, the template or the tokenizer cannot take the document; says what to do.
        """
        if isinstance(made, Text):
            if made.beside and self._tokenizer is None:
                self._used = "bytes"
                return [made.text, *made.beside.values()], 0
            return self._ended(made.text, made.open)
        if self._tokenizer is None:
            _refuse_media(made)
            self._used = "bytes"
            return [*_texts(made)], 0
        if made.instruction is not None and self._trainer == "trl":
            raise ValueError(
                "TRL takes no instruction and output: give the texts that your formatting_func makes, or name the"
                " trainer that does, --trainer axolotl or llamafactory"
            )
        if made.instruction is not None and self._trainer == "axolotl":
            return self._alpaca(*made.instruction)
        if any(made.media.values()) or any(_media_parts(made.messages)):
            return [], self._with_media(made)
        self._used = "template"
        return [self._rendered(made)], 0

    def notes(self) -> list[str]:
        """Sentences about the rule, as far as it was used."""
        of = f", by the rule of {_NAMES[self._trainer]}" if self._trainer else ""
        name = "" if self._tokenizer is None else self._tokenizer.title
        said = {
            "bytes": "Texts of conversations are counted without a chat template: --tokenizer FOLDER for one.",
            "template": f"Conversations are counted as the chat template of {name} writes them{of}.",
            "alpaca": "Instructions are counted in axolotl's prompt of type: alpaca, with the end of text.",
            "ended": f"Texts have the special tokens of {name} and an end of text{of}.",
            "media": f"Conversations with images or audio are counted by the processor of {name}.",
        }
        found = [said[self._used]] if self._used else []
        if self._ignored:
            found.append(f"The chat template does not write {', '.join(map(repr, self._ignored))} of messages.")
        return found

    def _ended(self, text: str, open: bool) -> tuple[list[str], int]:
        if self.plain or self._tokenizer is None:
            return [text], 0
        auto, self._used = self._whole, "ended"
        end = "" if open else auto.eos_token or ""
        if self._trainer == "llamafactory":
            return [text + end], int(bool(getattr(auto, "add_bos_token", False)))
        if self._trainer == "axolotl":
            special, _, ends = self._special
            return [text], special + (not ends and not open and not text.endswith(end))
        return [text if text.endswith(end) else text + end], self._special[0]

    @functools.cached_property
    def _special(self) -> tuple[int, bool, bool]:
        """Special tokens that the tokenizer adds to a text; whether the first begins it, and the last ends it."""
        auto = self._whole
        ids = auto("a")["input_ids"]
        count = len(ids) - len(auto("a", add_special_tokens=False)["input_ids"])
        return count, count > 0 and ids[0] == auto.bos_token_id, count > 0 and ids[-1] == auto.eos_token_id

    @functools.cached_property
    def _whole(self) -> Any:
        assert self._tokenizer is not None
        return self._tokenizer.whole(f"--trainer {self._trainer}" if self._trainer else "conversations")

    def _alpaca(self, instruction: str, given: str, answer: str, system: str) -> tuple[list[str], int]:
        auto, (special, begins, ends) = self._whole, self._special
        self._used = "alpaca"
        if system:
            self._ignored["system"] = None
        prompt = _ALPACA[0].format(instruction, given) if given else _ALPACA[1].format(instruction)
        return [prompt, answer], 2 * special - begins + (not ends and not answer.endswith(auto.eos_token or "\0"))

    # Templates.

    def _rendered(self, chat: Chat) -> str:
        assert self._tokenizer is not None
        auto, template = self._whole, self._tokenizer.template()
        if not template:
            raise ValueError(
                f"{self._tokenizer.title} has no chat template: give the folder of a tokenizer with one, or --field"
                " with the columns whose texts are joined"
            )
        if self._trainer == "llamafactory" and (chat.tools or any("tool_calls" in each for each in chat.messages)):
            raise ValueError(
                "LLaMA-Factory writes tools and their calls by templates of its own (template: in its yaml): measure"
                " rows without tools, or use --trainer axolotl or trl for the tokenizer's template"
            )
        messages, tools = [self._message(each) for each in chat.messages], self._tools(chat.tools)
        more = {name: value for name, value in chat.settings.items() if name not in ("tokenize", "return_dict")}
        if chat.open:
            open_answer = bool(messages) and messages[-1]["role"] == "assistant"
            more["continue_final_message" if open_answer else "add_generation_prompt"] = True
        for message in chat.messages:
            for key, value in message.items():
                if value and key not in template and key not in _SILENT:
                    self._ignored[key] = None
        if (tools or chat.tools) and "tools" not in template:
            self._ignored["tools"] = None

        def write(said: list[Message]) -> str:
            try:
                return str(auto.apply_chat_template(said, tools=tools, tokenize=False, **more))
            except Exception as cause:  # whatever the template raises
                raise ValueError(f"the chat template refuses it: {cause}{_way_out(said)}") from None

        text = write(messages)
        if self._trainer == "llamafactory" and not text.startswith(before := auto.decode(auto("")["input_ids"])):
            raise ValueError(
                f"LLaMA-Factory takes a template apart only if it begins with {before!r}, as texts do; this one does"
                " not: name a template of LLaMA-Factory's (template: in its yaml), and measure"
                " with --trainer axolotl"
            )
        if text.count("None") > sum(str(each).count("None") for each in messages if each.get("content")) and any(
            each.get("content", "") is None for each in messages
        ):
            filled = write([each | {"content": each.get("content") or ""} for each in messages])
            if text.count("None") > filled.count("None"):
                raise ValueError("the chat template writes None for a content of null: give '' in its place")
        return text

    def _message(self, message: Message) -> Message:
        content = message.get("content")
        if isinstance(content, list) and self._tokenizer is not None and not self._tokenizer.takes_parts():
            if self._trainer == "trl":
                raise ValueError(
                    "has content in parts, and the chat template takes text alone, which TRL does not join: join them"
                )
            message = message | {"content": "".join(str(part.get("text", "")) for part in content)}
        if self._trainer == "axolotl":
            message = {key: value for key, value in message.items() if value is not None}
            if message.get("tool_calls"):
                message["tool_calls"] = [_parsed(each, "arguments") for each in message["tool_calls"]]
        return message

    def _tools(self, tools: Any) -> Any:
        if not tools:
            return None
        if not isinstance(tools, list):
            raise ValueError(f"holds tools of type {type(tools).__name__}: must be a list of their descriptions")
        tools = [json.loads(each) if isinstance(each, str) else each for each in tools]
        return [_parsed(each, "parameters") for each in tools] if self._trainer == "axolotl" else tools

    # Images and audio.

    def _with_media(self, chat: Chat) -> int:
        """Tokens of a conversation with images or audio, by the model's processor."""
        assert self._tokenizer is not None
        processor = self._tokenizer.processor()
        if processor is None:
            _refuse_media(chat)
        self._used = "media"
        messages = _placed(chat)
        try:
            made = processor.apply_chat_template(
                messages,
                tools=self._tools(chat.tools),
                tokenize=True,
                return_dict=True,
                add_generation_prompt=chat.open,
            )
        except Exception as cause:  # whatever the processor raises
            raise ValueError(f"the model's processor refuses it: {cause}") from None
        ids = made["input_ids"]
        return len(ids[0] if len(ids) and hasattr(ids[0], "__len__") else ids)


_NAMES = {"trl": "TRL", "axolotl": "axolotl", "llamafactory": "LLaMA-Factory"}
_MEDIA = ("image", "image_url", "audio", "input_audio", "video", "video_url")


def _parsed(value: Any, key: str) -> Any:
    """A tool, or a call of one, with an object where it has its JSON as text."""
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get(key), str):
        return value
    return {**value, "function": {**function, key: json.loads(function[key])}}


def _way_out(messages: list[Message]) -> str:
    without = [place for place, each in enumerate(messages) if each.get("content") is None]
    return f"; message {without[0]} has no content: give it ''" if without else ""


def _texts(chat: Chat) -> Iterator[str]:
    """Every text of a conversation; objects as JSON."""
    for message in chat.messages:
        for key, value in message.items():
            if key in _SILENT or not value:
                continue
            for each in value if key == "content" and isinstance(value, list) else [value]:
                text = each.get("text", "") if isinstance(each, Mapping) and key == "content" else each
                yield text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    if chat.tools:
        yield json.dumps(chat.tools, ensure_ascii=False)


def _media_parts(messages: list[Message]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if isinstance(part, Mapping) and part.get("type") in _MEDIA:
                yield part


def _refuse_media(chat: Chat) -> None:
    kinds = [*(kind for kind, there in chat.media.items() if there)]
    kinds += [str(part["type"]) for part in _media_parts(chat.messages)]
    if kinds:
        raise ValueError(
            f"holds {kinds[0].split('_')[-1] if kinds[0].startswith('input') else kinds[0].split('_')[0]}, whose tokens"
            " the model's processor counts: give --tokenizer the model's folder, with its preprocessor_config.json; or"
            " --field with the column of the text, to count the text alone"
        )


def _placed(chat: Chat) -> list[Message]:
    """Messages in parts, with the images and recordings of the row where they belong.

    A part without its image takes the row's next one. Images for which there is no part stand before the text of the
    first message of the user, as TRL puts them, or where the text says `<image>`, as LLaMA-Factory does.
    """
    waiting = {kind: [_opened(each, kind) for each in values] for kind, values in chat.media.items()}
    made = []
    for message in chat.messages:
        content = message.get("content") or ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else [*content]
        found: list[dict[str, Any]] = []
        for part in parts:
            kind = str(part.get("type")).replace("input_", "").replace("_url", "")
            if kind == "text":
                found += _marked(str(part.get("text", "")), waiting)
            elif any(part.get(key) is not None for key in (kind, "url", "path", "base64", f"{kind}_url")):
                value = next(
                    part[key] for key in (kind, f"{kind}_url", "url", "path", "base64") if part.get(key) is not None
                )
                found.append({"type": kind, kind: _opened(value, kind)})
            elif waiting.get(kind):
                found.append({"type": kind, kind: waiting[kind].pop(0)})
            else:
                raise ValueError(f"has a part of type {kind}, and no {kind} for it")
        made.append(message | {"content": found})
    first = next((each for each in made if each["role"] == "user"), made[0])
    first["content"][:0] = [{"type": kind, kind: each} for kind, left in waiting.items() for each in left]
    return made


def _marked(text: str, waiting: dict[str, list[Any]]) -> list[dict[str, Any]]:
    kind = next((kind for kind in waiting if waiting[kind] and f"<{kind}>" in text), None)
    if kind is None:
        return [{"type": "text", "text": text}] if text else []
    before, _, after = text.partition(f"<{kind}>")
    found = [{"type": "text", "text": before}] if before else []
    return [*found, {"type": kind, kind: waiting[kind].pop(0)}, *_marked(after, waiting)]


def _opened(value: Any, kind: str) -> Any:
    """An image as Pillow's; what is no image stays a path. Nothing is loaded from elsewhere."""
    if isinstance(value, Mapping):
        inner = value.get("bytes")
        value = inner if inner is not None else value.get("path", value.get("url"))
    if isinstance(value, str) and "://" in value:
        raise ValueError(f"has {kind} at {value[:60]!r}, which is not loaded: give its bytes, or a path")
    if kind != "image" or not isinstance(value, str | bytes):
        return value
    import PIL.Image

    try:
        return PIL.Image.open(io.BytesIO(value) if isinstance(value, bytes) else Path(value)).convert("RGB")
    except OSError as cause:
        raise ValueError(f"has an image that cannot be opened: {cause}") from None
