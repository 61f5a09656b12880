"""What was asked once, with its answer and the command that gives it again; not part of the package.

Run from a checkout, with ``pip install '.[studies]'``:

- ``python -m studies.paper``: the tables and figures of WLB-LLM and Dynamic-CP beside ours (docs/results/papers.md).
- `studies.trainer`: a trainer with every option of wlb, for studies and tests.
- ``python -m studies.loss_curves``: does packing change what is learnt? (docs/results/loss_curves.md)
"""
