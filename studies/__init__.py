"""Questions that are asked once, with their answers and the commands that give them; not part of the package.

Run from a checkout, with ``pip install . --group studies``:

- ``python -m studies.paper``: the tables and figures of WLB-LLM and Dynamic-CP beside ours (docs/results/papers.md).
- `studies.trainer`: a trainer with every option of wlb, for studies and tests.
- ``python -m studies.gpu``: what only a GPU can show (docs/results/gpu.md).
"""
