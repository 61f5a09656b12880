"""What a launch file gives: settings of a scenario, and what was left out with the reason."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wlb_tools.cluster.parallel import ParallelLayout
from wlb_tools.command.errors import CliError


@dataclass
class Launch:
    """Settings that a launch file gives.

    Args:
        kind: name of the trainer.
        settings: fields of a scenario by name, such as "layout.tp"; "gpus" and "micro_batch_size".
        taken: sentences about keys that became settings.
        left: keys that did not, with the reason.
        unused: names of keys that a prediction has no use for.
        accumulation: micro-batches of a data-parallel rank, if the file says them instead of a global batch.
    """

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    accumulation: int = 0

    def take(self, key: str, value: object, name: str, given: object = ...) -> None:
        """Notes that a key became a setting; `given` is the setting's value if it is not that of the key."""
        name = f"layout.{name}" if name in ParallelLayout.__dataclass_fields__ else name
        self.settings[name] = value if given is ... else given
        self.taken.append(f"{key} = {value}: {name} = {_shown(self.settings[name])}")

    def leave(self, key: str, value: object, reason: str) -> None:
        """Notes that a key did not become a setting."""
        self.left.append(f"{key} = {value}: {reason}")

    def size(self, name: str, typed: Mapping[str, Any], default: int = 1) -> int:
        """A number: as typed, else as in the file."""
        value = typed.get(name, self.settings.get(name))
        return value if isinstance(value, int) and value > 0 else default

    def complete(self, typed: Mapping[str, Any], *, batch_given: bool = False) -> None:
        """Sets what needs the number of ranks, which may be typed: data-parallel ranks and micro-batches.

        Args:
            typed: settings of the command line, by name.
            batch_given: whether the command line gives the size of a global batch.
        """
        if not self.kind:
            return
        tp, cp, pp, ep = (self.size(f"layout.{axis}", typed) for axis in ("tp", "cp", "pp", "ep"))
        gpus = self.size("gpus", typed, 0)
        dp = gpus // (tp * cp * pp) if gpus else self.size("layout.dp", typed, 0)
        if not dp:
            dp = max(1, math.ceil(ep * self.size("layout.expert_tp", typed, tp) / (tp * cp)))
            self.take("GPUs", "not said; as few as there can be", "dp", dp)
        if self.accumulation and "num_micro_batches" not in typed and not batch_given:
            said = f"{self.accumulation} on each of dp = {dp} ranks"
            self.take("gradient accumulation", said, "num_micro_batches", self.accumulation * dp)
        if batch_given:
            self.settings.pop("num_micro_batches", None)

    def lines(self, path: Path) -> list[str]:
        """Lines that say what was taken and what was left out."""
        return [
            f"{path}: {self.kind}. Taken:" if self.kind else f"{path}: a scenario.",
            *(f"  {each}" for each in self.taken),
            *(["Left out:"] if self.left else []),
            *(f"  {each}" for each in self.left),
            *([f"Of no use to a prediction: {', '.join(sorted(self.unused))}."] if self.unused else []),
        ]


def _shown(value: object) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, Mapping):
        return ",".join(f"{name}={_shown(each)}" for name, each in value.items())
    return value if isinstance(value, str) else json.dumps(value)


# Reasons why a key is left out; keys of logging, data, learning rates and the like need none.
_REASONS: tuple[tuple[str, str], ...] = (
    (r"fp4", "FP4 is not modelled"),
    (r"fp8|float8", "FP8 is priced alike in every recipe"),
    (r"offload", "of what is offloaded only optimizer states are modelled: --set layout.offload_optimizer"),
    (r"load-in|load_in|quantiz", "frozen weights are counted in bfloat16"),
    (r"lora.*(target|modules)", "adapters are counted on every matrix but routers and routed experts"),
    (r"moe-shared|shared-expert|moe-layer-freq|moe-latent", "part of the model that --model sizes cannot say"),
    (r"multi-latent|kv-lora|q-lora|qk-head|qk-pos|v-head", "latent attention: give --model a config.json"),
    (r"mtp", "heads of multi-token prediction: --multi-token-prediction, with --model a config.json"),
    (r"moe-(token-dispatcher|a2a|expert-cap|grouped|aux|router-(load|bias))", "of how experts run, not of what"),
    (r"window", "a sliding window: give --model a config.json"),
    (r"overlap", "shares of communication that computation hides: --set dp_overlap, --set tp_overlap and the like"),
    (r"cp-comm-type", "keys and values are taken to be gathered, or with --set cp_keys=needed only a part of them"),
)


def reason_for(name: str) -> str | None:
    """Why a key that matters was left out; None: it does not matter to a prediction."""
    return next((reason for pattern, reason in _REASONS if re.search(pattern, name)), None)


def take_batch(launch: Launch, size: int, samples: int | None, layout: Mapping[str, int], gpus: int | None) -> None:
    """Sequences of a micro-batch, and micro-batches of a global batch."""
    if size > 1:
        launch.take("sequences of a micro-batch", size, "micro_batch_size")
    if not samples:
        return
    if samples % size:
        raise CliError(f"--from: a global batch of {samples} sequences is no multiple of micro-batches of {size}")
    dp = gpus // (layout["tp"] * layout["pp"] * layout["cp"]) if gpus else None
    count = samples // size
    if dp and count % dp:
        launch.leave("global batch", f"{samples} sequences", f"{count} micro-batches are no multiple of dp = {dp}")
        return
    launch.take(f"global batch of {samples} sequences", count, "num_micro_batches")
