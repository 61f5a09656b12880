"""How long `wlb lengths` takes over its tokenizer's own fast batch: processor time, interleaved, in one process.

    python -m benches.lengths           # prints ratios; 5 rounds over 8 MB of this interpreter's Python files

Both read the same texts with the same `tokenizer.json`, trained here on a part of them: the tokenizer in one call of
`encode_batch_fast` over texts in memory, `wlb lengths` from a file, whose reading counts.
"""

from __future__ import annotations

import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benches.common import options

ROUNDS = 5
BYTES = 8 << 20


def texts() -> list[str]:
    """Python files of this interpreter, in the order of their names."""
    found, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        found.append(path.read_text(encoding="utf-8", errors="replace"))
        size += len(found[-1])
        if size > BYTES:
            break
    return found


def main(rounds: int = ROUNDS) -> None:
    """Prints the ratios of each format."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import tokenizers
    from rich.progress import Progress

    from wlb_tools.command.inputs.documents import read_documents, wanted

    corpus = texts()
    with tempfile.TemporaryDirectory() as folder:
        pq.write_table(pa.table({"text": corpus}), f"{folder}/texts.parquet")
        Path(folder, "texts.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in corpus))
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=8000, show_progress=False)
        tokenizer.train_from_iterator(corpus[::8], trainer)
        tokenizer.save(f"{folder}/tokenizer.json")
        wants = wanted("", f"{folder}/tokenizer.json")

        def alone() -> int:
            return sum(len(each) for each in tokenizer.encode_batch_fast(corpus, add_special_tokens=False))

        def measured(name: str) -> Callable[[], int]:
            def run() -> int:
                with Progress(disable=True) as bars:
                    source = f"{folder}/{name}"
                    return read_documents([source], wanted=wants, pattern=None, cache=None, progress=bars).tokens

            return run

        runs = {"tokenizer": alone, "parquet": measured("texts.parquet"), "jsonl": measured("texts.jsonl")}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        tokens = alone()  # also warms up
        for _ in range(rounds):
            for name, run in runs.items():
                begin = time.process_time()
                assert run() == tokens, name
                seconds[name].append(time.process_time() - begin)
    for name in ("parquet", "jsonl"):
        ratios = [ours / own for ours, own in zip(seconds[name], seconds["tokenizer"], strict=True)]
        print(f"{name}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), {rounds} rounds")


if __name__ == "__main__":
    options(__doc__).parse_args()
    main()
