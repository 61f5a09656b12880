"""``python -m studies.gpu``: everything in wlb that only a GPU can show, in pieces that fit a short loan of one.

It needs wlb's wheel, this checkout, numpy and torch, and no network. Every item is written down when it is done, so
that a run that ends, by its budget or by a crash, goes on from there when it is started again with the same folder.
The pieces, in the order of what matters first:

- *parity*: every kernel against float64, in bfloat16, rank by rank;
- *transports*: several processes on one GPU, every transport, against the same;
- *sanitizer*: a tiny part of the parity under `compute-sanitizer`;
- *profile-...*: `wlb profile` of a model with as many key heads as heads, of one with fewer, and of that of *step*;
- *attention*: one layer of a 7B model under every strategy, and what is left of a step around its kernels;
- *step*: a whole 1B model, micro-batch after micro-batch, beside the cost model.

On a machine without a GPU all of them run on small sizes, which shows that they run and says nothing of a GPU.
"""
