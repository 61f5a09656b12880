"""The stream of global batches for every method of a comparison."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import numpy as np
from cyclopts import Parameter, Token
from cyclopts.types import NonNegativeInt
from numpy.typing import NDArray
from rich.progress import Progress

import wlb
from wlb._choices import Oversize
from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.cells import Holds
from wlb_tools.command.inputs.documents import Documents, read_documents, wanted
from wlb_tools.command.inputs.given import Columns
from wlb_tools.command.inputs.lengths_cache import LengthsCache
from wlb_tools.command.inputs.options import Flag, Options, options
from wlb_tools.command.words import counted
from wlb_tools.simulation.methods import Setup
from wlb_tools.simulation.stream import GlobalBatches

Trainer = Literal[
    "loop", "huggingface", "trl", "axolotl", "llamafactory", "lightning", "megatron", "torchtitan", "verl"
]

_MOST_PIECES = 10**8  # most pieces of several epochs, at 75 bytes each

Source = Annotated[
    tuple[str, ...],
    Parameter(
        help="Files, folders, patterns of these, data sets on the hub, or - for standard input; several follow one"
        " another. A .parquet, .arrow, .feather, .jsonl, .json, .csv, .tsv or .txt, also .gz or .zst; a folder of"
        " these, or of other files, each a document; a folder of save_to_disk; a .tar of a WebDataset; a .npy or .npz;"
        " or the .idx and .bin of a data set of Megatron's.",
        negative="",
    ),
]


def trainer_named(text: str) -> Trainer:
    """The trainer of this name, however it is spelt: "TRL", "Hugging Face", "LLaMA-Factory", "Megatron-Core".

    Raises:
        CliError: there is none.
    """
    plain = "".join(letter for letter in text.lower() if letter.isalnum())
    found: Trainer
    for found in get_args(Trainer):
        if plain in (found, f"{found}core", f"{found}lm"):
            return found
    if plain in ("grain", "jax", "maxtext"):
        raise CliError(
            f"--trainer {text}: it takes a wlb.Packer of your own (docs/trainers/grain.md); give --trainer loop, which"
            " writes one"
        )
    raise CliError(f"--trainer {text}: must be one of {', '.join(get_args(Trainer))}")


def _trainer(type_: object, tokens: Sequence[Token]) -> Trainer:
    return trainer_named(tokens[0].value)


@dataclass(frozen=True)
class Stream(GlobalBatches):
    """Global batches of the documents of a source.

    A document longer than the context becomes several, one after the other.
    """

    documents: Documents
    ids: NDArray[np.int64]  # [n] document of the source
    starts: NDArray[np.int64]  # [n] its first token inside that document
    epochs: int  # passes over the source; the last one may be incomplete
    context: int  # most tokens of a document
    tokens_per_batch: int  # most tokens of a global batch
    oversize: Oversize  # what was done with longer documents

    def described(self) -> dict[str, Any]:
        """The documents of the source and of the stream, as plain JSON values; lengths in `unit`."""
        return {
            **self.documents.described,
            "distinct_used": np.unique(self.ids).size,
            "longer_than_context": int((self.documents.lengths > self.context).sum()),
            "epochs": self.epochs,
            "global_batches": self.batches,
            "streamed_tokens": int(self.lengths.sum()),
            "streamed_documents": self.lengths.size,
        }

    def in_words(self) -> list[str]:
        """Sentences about the stream."""
        d = self.described()
        sentences = [
            self.documents.in_words(),
            f"{d['global_batches']:,} global batches of up to {self.tokens_per_batch:,} tokens"
            f" ({self.tokens_per_batch // self.context} micro-batches x {self.context:,}), from"
            f" {d['distinct_used']:,} distinct documents in {counted(d['epochs'], 'epoch')}.",
        ]
        if d["longer_than_context"]:
            fate = "truncated" if self.oversize == "truncate" else "split"
            sentences.append(f"{d['longer_than_context']:,} documents longer than the context are {fate} to fit it.")
        return sentences


@options
class Texts(Options):
    """Options for reading documents.

    Args:
        field: column with the documents, by default found by its name; several with commas between are joined, such as
            prompt,completion. A column has text, token ids, lengths or chat messages.
        pattern: names of the files to take from a directory; by default all data files, or if there are none, every
            file is a document.
        tokenizer: counts the tokens: a tokenizer.json, a tekken.json, a file of sentencepiece, a folder with one, or
            a name on the hub; by default a byte counts as a token.
        trainer: loop, huggingface, trl, axolotl, llamafactory, lightning, megatron, torchtitan or verl. Rows with text
            become token sequences by the rule of trl, axolotl or llamafactory; by default by the chat template alone.
        text: the source has text, if it could also be lengths or token ids.
        tokens: the source has token ids, if it could also be lengths.
        lengths: the source has lengths of documents, if it could also be token ids or text.
        cache: keep lengths of tokenized files in the user's cache folder, and use them.
    """

    field: str = ""
    pattern: str | None = None
    tokenizer: str | None = None
    trainer: Annotated[Trainer | None, Parameter(converter=_trainer)] = None
    text: Annotated[bool, Flag] = False
    tokens: Annotated[bool, Flag] = False
    lengths: Annotated[bool, Flag] = False
    cache: bool = True

    def documents(self, sources: Sequence[str], progress: Progress) -> Documents:
        """Finds the documents of `sources` and measures them; without sources, this interpreter's Python files."""
        held: list[Holds] = [name for name in get_args(Holds) if getattr(self, name)]
        if len(held) > 1:
            raise CliError(f"{' '.join(f'--{name}' for name in held)}: only one can be so")
        wants = wanted(self.field, self.tokenizer, held[0] if held else None, self.trainer)
        kept = LengthsCache() if self.cache else None
        return read_documents(sources, wanted=wants, pattern=self.pattern, cache=kept, progress=progress)


@options
class Reading(Texts):
    """Options for reading documents and making a stream of them.

    Args:
        seed: shuffles the documents, differently in every epoch; by default they come in the source's order.
        oversize: what to do with documents longer than the context.
    """

    seed: NonNegativeInt | None = None
    oversize: Oversize = "split"

    def stream(
        self,
        sources: Sequence[str],
        setup: Setup,
        progress: Progress,
        *,
        steps: int | None = None,
        columns: Columns | None = None,
        longest: int | None = None,
    ) -> Stream:
        """The documents of `sources` in global batches, see `order`; with their costs, if they have given ones."""
        documents = self.documents(sources, progress)
        context = setup.context if longest is None else longest
        stream = self.order(documents, context=context, tokens_per_batch=setup.tokens_per_batch, steps=steps)
        if columns is None:
            return stream
        rows = np.searchsorted(documents.ids, stream.ids)
        whole, costs = documents.lengths[rows][:, None], columns.of(documents)[rows]
        pieces = stream.lengths[:, None]
        # A piece has the share of its document's costs that it has of the tokens, as in a packer; the costs of whole
        # documents stay exactly the same.
        costs = np.where(pieces == whole, costs, costs * pieces / whole)
        columns.check_limits(costs, stream.ids)
        return dataclasses.replace(stream, costs=costs, limits=columns.limits)

    def order(self, documents: Documents, *, context: int, tokens_per_batch: int, steps: int | None = None) -> Stream:
        """Orders the documents, fits them to `context` tokens and forms global batches of `tokens_per_batch`.

        With a seed, every epoch has another order; without one the order is the source's. With `steps`, epochs follow
        one another until there are that many global batches; without, there is one epoch, and the last batch may be
        small.
        """
        name, unit, lengths = documents.source, documents.unit, documents.lengths
        if self.oversize == "truncate":
            lengths = np.minimum(lengths, context)
        count, tokens = lengths.size, int(lengths.sum())
        if tokens < tokens_per_batch:
            raise CliError(
                f"{name}: {counted(count, 'document')} with {tokens:,} {unit} do not fill a global batch of"
                f" {tokens_per_batch:,}; lower --context or --micro-batches"
            )
        epochs = 1 if steps is None else math.ceil(steps * tokens_per_batch / tokens)
        most = epochs * (count + tokens // context)  # pieces, at most
        if epochs > 1 and most > _MOST_PIECES:
            raise CliError(
                f"--steps {steps:,}: {epochs:,} epochs of {name}, up to {most:,} documents; the most is"
                f" {_MOST_PIECES:,}"
            )
        generator = None if self.seed is None else np.random.default_rng(self.seed)
        order = np.concatenate(
            [np.arange(count) if generator is None else generator.permutation(count) for _ in range(epochs)]
        )
        lengths, ids = lengths[order], documents.ids[order]

        starts = np.zeros_like(lengths)
        if self.oversize == "split":
            pieces, first, lengths = wlb.split_documents(lengths, max_document_tokens=context)
            ids, starts = ids[pieces], first.astype(np.int64)
        elif lengths.max() > context:
            worst = int(lengths.argmax())
            raise CliError(
                f"{name}: document {ids[worst]} has {lengths[worst]:,} {unit}, more than --context {context:,};"
                " choose --oversize split or truncate"
            )

        # No batch exceeds `tokens_per_batch`, so the epochs have at least `steps` of them; the small last one is left
        # out.
        offsets = wlb.batch_offsets(lengths, tokens_per_batch=tokens_per_batch)
        if steps is not None:
            offsets = offsets[: steps + 1]
        used = int(offsets[-1])
        return Stream(
            lengths=lengths[:used].astype(np.int64),
            offsets=offsets,
            documents=documents,
            ids=ids[:used],
            starts=starts[:used],
            epochs=epochs,
            context=context,
            tokens_per_batch=tokens_per_batch,
            oversize=self.oversize,
        )
