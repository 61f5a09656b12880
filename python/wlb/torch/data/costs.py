"""Other costs from a step on, in loaders that plan ahead of training."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import wlb
from wlb._errors import check_integer, error
from wlb._seal import seal
from wlb.torch.data.work import Replan, replan_as


class CostSwitches:
    """From which step on a loader plans by which costs.

    A loader plans ahead: its threads and workers hold steps that training has not reached. So a change names the first
    step that is planned by the new costs, and that has to be one which nobody has begun to plan, on any rank. `held`
    keeps planning from going on until the ranks have agreed on it.

    Whoever plans a step says so (`begin`) and gets the costs to plan it by. The changes stay known for good: a step
    that was planned ahead is planned again where it is consumed.

    Attributes:
        replan: Plans the documents of a step anew by other costs.
    """

    def __init__(self, cost_model: wlb.CostModel | None, replan: Replan) -> None:
        """No change so far; nothing is planned. None where documents bring their costs."""
        self._cost_model = cost_model
        self.replan = replan
        self._changes: dict[int, wlb.CostModel] = {}
        self._begun = 0  # the first step that nobody has begun to plan
        self._open = threading.Condition()
        self._held = False

    @classmethod
    def of_packer(cls, packer: wlb.Packer) -> CostSwitches:
        """Of a loader that plans by a packer like this one."""
        return cls(packer.cost_model, replan_as(packer))

    def __getstate__(self) -> dict[str, Any]:
        # Who gets a copy plans for itself: nobody there holds it.
        return {name: value for name, value in vars(self).items() if name not in ("_open", "_held")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _open=threading.Condition(), _held=False)

    def begin(self, step: int, *, real: bool = True) -> wlb.CostModel | None:
        """The costs of a step whose plan begins; waits while planning is held.

        A plan that is not `real`, made only to know what would come, neither waits nor counts as begun.
        """
        with self._open:
            if real and step >= self._begun:
                self._open.wait_for(lambda: not self._held)
                self._begun = max(self._begun, step + 1)
            return self.of(step)

    def of(self, step: int) -> wlb.CostModel | None:
        """What a step is planned by, or was; None where documents bring their costs."""
        with self._open:
            before = [at for at in self._changes if at <= step]
            return self._changes[max(before)] if before else self._cost_model

    @contextmanager
    def held(self) -> Iterator[int]:
        """Nobody begins to plan a further step inside; gives the first that nobody has begun to plan.

        Other threads wait. What they have begun goes on, also with other ranks: no step that was given depends on one
        that waits here.
        """
        with self._open:
            self._held = True
            begun = self._begun
        try:
            yield begun
        finally:
            with self._open:
                self._held = False
                self._open.notify_all()

    def switch(self, step: int, cost_model: wlb.CostModel) -> None:
        """Steps from `step` on are planned by `cost_model`. The same on every rank.

        Raises:
            wlb.WlbError: That step has a plan already, or its costs are known to change to others, or documents bring
                their costs.
        """
        if self._cost_model is None:
            raise error("cost_model", "has no meaning for a loader whose documents bring their costs")
        check_integer("step", step, minimum=0)
        with self._open:
            if step < self._begun:
                message = f"= {step}: is planned already; the first that is not is step {self._begun}"
                raise error("step", message, value=step)
            if self._changes.get(step, cost_model) != cost_model:
                raise error("step", f"= {step}: its costs change to others already", value=step)
            self._changes[step] = cost_model

    @property
    def latest(self) -> wlb.CostModel | None:
        """What steps are planned by once all changes have come into effect; None where documents bring their costs."""
        with self._open:
            return self._changes[max(self._changes)] if self._changes else self._cost_model

    def to_come(self, step: int) -> dict[int, wlb.CostModel]:
        """The changes at `step` or later."""
        with self._open:
            return {at: cost_model for at, cost_model in sorted(self._changes.items()) if at >= step}

    def restart(self, step: int, cost_model: wlb.CostModel | None, changes: Mapping[int, wlb.CostModel]) -> None:
        """Planning begins anew at `step`, by these costs; and these changes are to come."""
        with self._open:
            self._cost_model = cost_model
            self._changes = dict(changes)
            self._begun = step

    def saved_with(self, state: dict[str, Any]) -> dict[str, Any]:
        """A sealed state with the changes to come after it; itself where there are none.

        No step left it like that: it has moved from the state that one did leave, so that the chain of the steps is the
        same whether a change was decided before or after they were planned.
        """
        changes = self.to_come(state["step"])
        if not changes:
            return state
        head = state["previous"] if state["moved"] else state["digest"]
        known = [{"step": step, "cost_model": json.loads(cost_model.to_json())} for step, cost_model in changes.items()]
        return seal({**state, "cost_changes": known, "previous": head, "moved": True})


def with_costs(packer: wlb.Packer, cost_model: wlb.CostModel | None) -> wlb.Packer:
    """The packer itself, or one like it that goes on by these costs."""
    if cost_model is None or packer.cost_model == cost_model:
        return packer
    packer = packer.copy()
    packer.set_cost_model(cost_model)
    return packer


def read_changes(state: Mapping[str, Any]) -> dict[int, wlb.CostModel]:
    """The changes to come that `told` has put into a state.

    Raises:
        wlb.WlbError: There is something else.
    """
    changes = {}
    saved = state.get("cost_changes", [])
    for index, change in enumerate(saved if isinstance(saved, list) else [saved]):
        try:
            step, cost_model = change["step"], wlb.CostModel.from_json(json.dumps(change["cost_model"]))
        except (TypeError, KeyError, wlb.WlbError) as cause:
            raise error("state", f"has no change of costs in 'cost_changes': {cause}", index=index) from cause
        if not isinstance(step, int) or isinstance(step, bool) or step < state["step"]:
            raise error("state", f"has a change of costs at step {step!r}, which is past", index=index, value=step)
        changes[step] = cost_model
    return changes
