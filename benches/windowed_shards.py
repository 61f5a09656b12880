"""Shards of models whose layers have sliding windows: what it costs that `wlb.shard` weighs full pairs.

    python -m benches.windowed_shards --lengths wheels_py.npy wheels_doc.npy man_man.npy

One shard serves all layers. `auto` and `per_document` make the pairs of full layers even, and those of windowed layers
as they fall. *Pairs*: those of the busiest rank over the mean rank's in a windowed layer, and in a full one. *Lost*:
what ranks wait for the busiest in the windowed layers of the model, of the model's whole time, by its FLOPs; no way to
shard could win more than this by weighing windows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

import wlb
from benches.common import Row, machine, options, parse, rounded, sources, tables, write_record
from benches.sharding import CP_SIZES, micro_batches

MODELS = {
    # Shapes as their config.json has them.
    "gemma3-27b: 52 of 62 layers, window 1,024": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "vocab_size": 262208,
        "sliding_window": 1024,
        "layer_types": ["full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(62)],
    },
    "mistral-7b: all layers, window 4,096": {
        "model_type": "mistral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "sliding_window": 4096,
    },
}
WAYS = ("auto", "per_document")
RATE = 0.85  # of attention beside everything else, as `Hardware.preset("h100")` assumes


def window_pairs(shard: wlb.Shard, window: int) -> NDArray[np.float64]:
    """float64[cp]: pairs of each rank where a query sees itself and the `window - 1` keys before it."""

    def up_to(positions: NDArray[np.int64]) -> NDArray[np.int64]:
        short = np.minimum(positions, window)
        return short * (2 * positions - short + 1) // 2

    pairs = []
    for rank in map(shard.rank, range(shard.cp_size)):
        queries, keys = (np.diff(of).astype(np.int64) for of in (rank.cu_seqlens_q, rank.cu_seqlens_k))
        pairs.append(float((up_to(keys) - up_to(keys - queries)).sum()))
    return np.array(pairs)


def waits(batches: list[NDArray[np.int32]], model: wlb.ModelConfig) -> tuple[Table, list[Row]]:
    """Unevenness and lost time: means over micro-batches, and the worst."""
    cost_model = model.cost_model(attention_efficiency=RATE)
    terms = cost_model.terms
    ((name, rate),) = ((name, rate) for name, rate in terms.items() if name.startswith("window_pairs"))
    window = int(name.partition("[")[2].rstrip("]"))
    table = Table("CP", "way", "windowed pairs", "worst", "full pairs", "lost in windows", "worst", "lost in full")
    rows: list[Row] = []
    for cp_size in CP_SIZES:
        for way in WAYS:
            found = []
            for lengths in batches:
                shard = wlb.shard(lengths, cp_size=cp_size, strategy=way)
                windowed, full = window_pairs(shard, window), shard.pairs_per_rank.astype(float)
                work = cost_model.cost(lengths).sum() / cp_size
                found.append(
                    (
                        windowed.max() / windowed.mean(),
                        full.max() / full.mean(),
                        rate * (windowed.max() - windowed.mean()) / work,
                        terms.get("pairs", 0.0) * (full.max() - full.mean()) / work,
                    )
                )
            mean, worst = np.mean(found, axis=0), np.max(found, axis=0)
            table.add_row(
                str(cp_size),
                way,
                f"{mean[0]:.4f}",
                f"{worst[0]:.4f}",
                f"{mean[1]:.4f}",
                f"{mean[2]:.3%}",
                f"{worst[2]:.3%}",
                f"{mean[3]:.3%}",
            )
            rows.append(
                {
                    "cp": cp_size,
                    "way": way,
                    "windowed_pairs": mean[0],
                    "windowed_pairs_worst": worst[0],
                    "full_pairs": mean[1],
                    "lost": mean[2],
                    "lost_worst": worst[2],
                    "lost_in_full": mean[3],
                }
            )
    return table, rows


def main() -> None:
    parser = options(__doc__, lengths=True, record="windowed_shards.json")
    parser.add_argument("--tokens", type=int, default=131_072, help="tokens of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=96)
    arguments = parse(parser)
    console = tables(120)
    record: Row = {"machine": machine(), "tokens": arguments.tokens, "models": {}}
    for name, lengths in sources(arguments.lengths, documents=200_000).items():
        batches = micro_batches(lengths, arguments.tokens, arguments.micro_batches)
        for title, config in MODELS.items():
            table, rows = waits(batches, wlb.ModelConfig.from_hugging_face(config))
            table.title = f"{title}; {name}, {len(batches)} micro-batches of {arguments.tokens} tokens"
            console.print(table)
            record["models"].setdefault(title, {})[name] = rows
    write_record(arguments.record, rounded(record))


if __name__ == "__main__":
    main()
