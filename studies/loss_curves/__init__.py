"""``make loss-curves``: does packing change what is learnt?

The same small model is trained on the same documents in the same order of arrival, packed in every way that the library
has, over several seeds. Everything is paired: a seed has its own weights, its own documents and their order, equal for
all ways of packing; compared are the differences within a seed.

- *Equal tokens*: every run trains every document of its seed once, and the learning rate follows the tokens trained, so
  that it has fallen to 0 when all are.
- *Equal steps*: documents wait, so a stream needs a step or two more to train them all. Models are also evaluated
  after as many steps as order of arrival takes; fewer tokens are trained then.

A difference is graded by an interval, and by whether it is shown to lie within a margin that was named before: the test
of equivalence in `studies.loss_curves.statistics`.
"""

from __future__ import annotations
