"""Which upcoming documents enter a packer in a step, one by one in plain Python: slow, and as the rules read."""

from collections.abc import Sequence

import wlb


def offered(
    packer: wlb.Packer,
    lengths: Sequence[int],
    *,
    most_early: Sequence[int],
    steps: Sequence[int] | None,
    wanted: int,
    tokens_per_batch: int,
    min_step_tokens: int,
    to_the_end: bool,
) -> tuple[int, list[int], int, list[int] | None]:
    """`wlb.Packer.offered`; `wanted` counts if `steps` is None."""
    new = [most >= 0 for most in most_early]
    least = max(min_step_tokens, 1)
    end = 0
    if steps is None:
        while end < len(lengths) and (sum(lengths[: end + 1]) <= wanted or not any(new[:end])):
            end += 1
        left = sum(length for length, is_new in zip(lengths[end:], new[end:], strict=True) if is_new)
        if to_the_end and left < least:
            end = len(lengths)
        steps = [0] * end
        for at in range(end, len(lengths)):
            steps.append(1 + sum(lengths[end:at]) // tokens_per_batch)
    else:
        end = steps.count(0)
    due = [at for at in range(end) if new[at]]
    later = range(end, len(lengths))
    most = max((most_early[at] for at in later), default=0)
    comes: list[int] = []
    if most > 0:
        leads = packer.leads(lengths, tokens_per_batch=tokens_per_batch, most=most).tolist()
        comes = [at for at in later if min(leads[at], most_early[at]) >= steps[at]]
    stays = sum(lengths[at] for at in later if new[at] and at not in comes)
    if not comes or (to_the_end and stays < least):
        return end, due, len(due), None
    return end, due + comes, len(due), [0] * len(due) + [steps[at] for at in comes]


def entering(packer: wlb.Packer, lengths: Sequence[int], *, min_step_tokens: int, rest_waits: bool) -> int:
    """Number of pieces, from the first on, that `wlb.Packer.fill` takes."""
    admitted = packer.admits(lengths)
    rests = [sum(lengths[at:]) for at in range(len(lengths) + 1)]
    if not rest_waits or admitted == len(lengths) or rests[admitted] >= min_step_tokens:
        return admitted
    return max((at for at in range(1, admitted) if rests[at] >= min_step_tokens), default=admitted)
