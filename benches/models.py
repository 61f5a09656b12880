"""Every family of models that `wlb.ModelConfig.from_hugging_face` knows, beside transformers' own model.

    python -m benches.models [--record FILE] [--page FILE]

Parameters of the family's default config at full size; forward FLOPs of a tiny one, counted as
`tests/oracles/transformers_models.py` says. Writes docs/results/families.md.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import wlb
from benches.common import DOCS, Row, bars, options, write_record
from tests.oracles import transformers_models as real
from wlb.models import Attention, Block, CountedBlock, FeedForward, LatentAttention, Mask

_NAMES: dict[type[Block], str] = {
    Attention: "attention",
    LatentAttention: "latent attention",
    FeedForward: "dense",
}

_SHORT = {
    "full": "full",
    "window": "window {size}",
    "chunk": "chunk {size}",
    "bidirectional": "whole image",
    "bidirectional_window": "window",
}


def main() -> None:
    parser = options(__doc__ or "", lengths=False, record="models.json")
    parser.add_argument("--page", type=Path, default=DOCS / "results" / "families.md", help="where the table goes")
    chosen = parser.parse_args()
    with bars() as progress:
        rows = [measured(case) for case in progress.track(real.CASES, description="families")]
    record: Row = {"transformers": version("transformers"), "torch": version("torch"), "families": rows}
    write_record(chosen.record, record)
    chosen.page.write_text(page(record))


def measured(case: real.Case) -> Row:
    """One family."""
    full, tiny = case.config(), case.tiny_config()
    model, small = wlb.ModelConfig.from_hugging_face(full), wlb.ModelConfig.from_hugging_face(tiny)
    text = real.count_text(tiny)
    row: Row = {
        "family": case.model_type,
        "layers": [f"{count} x {layer_name(layer.blocks)}" for layer, count in model.kinds.items()],
        "parameters": model.num_parameters,
        "parameters_of_transformers": real.num_parameters(full),
        "flops": float(small.flops([real.TOKENS])[0]) / 3,
        "counted": vars(text) | {"total": text.total},
    }
    if case.grid is not None and small.vision is not None:
        image = real.count_image(tiny, case.grid)
        row["image_flops"] = float(small.vision.flops([case.grid])[0]) / 3
        row["image_counted"] = vars(image) | {"total": image.total}
    return row


def layer_name(blocks: tuple[Block, ...]) -> str:
    """The blocks of a layer in words."""
    return " + ".join(_block_name(block) for block in blocks)


def _block_name(block: Block) -> str:
    masks = [mask for mask, _ in block.pairs()]
    if isinstance(block, CountedBlock):
        kind = "attention" if masks else "state" if block.num_heads else "counted"
        name = f"counted {kind}" if kind != "counted" else kind
    else:
        name = _NAMES[type(block)]
    experts = getattr(block, "num_experts", 1)
    if experts > 1:
        shared = " and shared" if getattr(block, "shared_width", 0) else ""
        return f"{experts} experts{shared}"
    return f"{name} ({', '.join(_mask_name(mask) for mask in masks)})" if masks else name


def _mask_name(mask: Mask) -> str:
    return _SHORT[mask.kind].format(size=f"{mask.size:,}")


def page(record: Row) -> str:
    """docs/results/families.md."""
    errors = [abs(row["flops"] / row["counted"]["total"] - 1) for row in record["families"]]
    exact = sum(row["parameters"] == row["parameters_of_transformers"] for row in record["families"])
    lines = [
        "Written by `python -m benches.models` ([record](../../benches/records/models.json)); do not edit.",
        "",
        "# Families of models",
        "",
        f"{len(errors)} families: parameters are exact for {exact}, FLOPs are off by at most {max(errors):.3%}.",
        "Each family of `wlb.ModelConfig.from_hugging_face` is compared with the model that transformers"
        f" {record['transformers']}",
        f"builds (torch {record['torch']}): parameters at the size of the default configuration, forward FLOPs of",
        "a tiny model, counted by torch. What is not the model's work is taken off: experts on tokens that do not",
        "visit them, scores of an indexer above the diagonal.",
        "",
        "| family | layers of its default config | parameters | off by | FLOPs off by | of an image |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in record["families"]:
        off = row["parameters"] - row["parameters_of_transformers"]
        image = "" if "image_flops" not in row else _off(row["image_flops"], row["image_counted"]["total"])
        cells = [
            f"`{row['family']}`",
            "; ".join(row["layers"]),
            f"{row['parameters']:,}",
            f"{off:,}",
            _off(row["flops"], row["counted"]["total"]),
            image,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _off(ours: float, counted: float) -> str:
    return "0" if ours == counted else f"{ours / counted - 1:+.3%}"


if __name__ == "__main__":
    main()
