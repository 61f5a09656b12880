"""``python -m studies.gpu``: everything in wlb that only a GPU can show, in pieces that fit a short loan of one.

It needs wlb's wheel, this checkout, numpy and torch, and no network. Every item is written down when it is done, so
that a run that ends, by its budget or by a crash, goes on from there when it is started again with the same folder.
The pieces, in the order of what matters first:

- *parity*: every kernel against float64, in bfloat16, rank by rank;
- *transports*: several processes on one GPU, every transport, against the same;
- *training*: a loop with wlb's loader and a Hugging Face Trainer, beside the CPU;
- *sanitizer*: a tiny part of the parity under `compute-sanitizer`;
- *profile-...*: `wlb profile` of Llama 3 8B, and of the model of *step*;
- *attention*: one layer of Llama 3 8B under every strategy, rank by rank, and its kernels alone;
- *step*: a whole 1B model: the micro-batches of four ranks under several plans, beside the cost models.

`--report FOLDER` writes the page of records without a GPU.

On a machine without a GPU all of them run on small sizes, which shows that they run and says nothing of a GPU.
"""
