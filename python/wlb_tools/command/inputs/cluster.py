"""A model on a cluster: a launch file or a scenario, the options of the command line, and `--set`, in this order."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, PositiveInt

import wlb
import wlb_tools
from wlb_tools.command.errors import CliError, in_options, setting
from wlb_tools.command.inputs.launch import read_launch
from wlb_tools.command.inputs.model import Cost, model_config
from wlb_tools.command.inputs.options import BATCHES, WAITING, GlobalBatch, GlobalBatchSize, Settings, options
from wlb_tools.command.inputs.packing import Delay, Limits
from wlb_tools.command.words import listed
from wlb_tools.simulation.data import arguments, filled

PAPER: dict[str, Any] = {
    "model": "llama2-7b",
    "gpu": "h100",
    "context": 131072,
    "layout": {"tp": 8, "cp": 2, "pp": 4, "dp": 1},
}
"""The paper's layout for a 7B model with 128K tokens of context: what stands where nothing is given."""

_SHARDED: dict[str, Any] = {"tp": 1, "cp": 1, "pp": 1, "fsdp": "zero3", "recompute": "full"}
"""What stands there instead for trainers that do not divide the model: FSDP over all GPUs."""

_FIELDS = {
    "model_name": "model",
    "cost_file": "cost_model",
    "attention_efficiency": "hardware.attention_efficiency",
    **{name: f"layout.{name}" for name in ("tp", "cp", "pp", "dp")},
    **{name: name for name in ("gpu", "context", "max_tokens", "num_micro_batches", "micro_batch_size", "num_queues")},
    **{name: name for name in ("kernel_model", "max_mean_delay", "max_delay", "max_step_cost")},
    "gpu_count": "gpus",
}
"""The setting of each option."""


@options
class Cluster(Cost, Limits, Delay):
    """A scenario whose model and hardware are names.

    Args:
        max_tokens: the most tokens of a micro-batch of variable length; on a cluster by default what fits into memory.
        tp: tensor-parallel ranks.
        cp: context-parallel ranks.
        pp: pipeline ranks.
        dp: data-parallel ranks; with --gpus by default GPUs / (tp x cp x pp).
        gpu_count: number of GPUs: dp is GPUs / (tp x cp x pp); if dp is given, the product is checked.
        launch_file: a scenario (.toml), or what starts a trainer: a script or list of Megatron's arguments, a .toml or
            .json of torchtitan, a .yaml of Megatron, axolotl or LLaMA-Factory. Options and --set override it. The
            command says what was taken and what was left out.
        changes: any other setting, such as --set layout.fsdp=zero3 or --set cp_overlap=0.5: a field of
            wlb_tools.Scenario, of its layout (wlb_tools.ParallelLayout) or of its hardware (wlb_tools.Hardware). May be
            given several times.
        kernel_model: name or path of a profile of `wlb profile`, instead of the assumed kernel of the GPU. Its linear
            part is used, too, if it was measured for this model's layer on a tensor-parallel rank.
        micro_batch_size: sequences of --context tokens in a micro-batch. `wlb tune` and `wlb advise` choose the tokens
            of a micro-batch themselves, and use this only for the size of the global batch.
        num_micro_batches: micro-batches of a global batch, a multiple of dp; by default pp x dp, as in the paper.
        global_batch: size of a global batch, instead of --micro-batches: tokens, such as 4M, or samples of --context
            tokens, such as 256samples.
        num_queues: number of outlier queues, whose thresholds are tuned.
    """

    tp: int = 8
    cp: int = 2
    pp: int = 4
    dp: int = 1
    gpu_count: int | None = None
    launch_file: Path | None = None
    changes: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    kernel_model: str | None = None
    num_micro_batches: Annotated[PositiveInt | None, BATCHES] = None
    micro_batch_size: Annotated[PositiveInt, BATCHES] = 1
    global_batch: Annotated[GlobalBatch | None, BATCHES, GlobalBatchSize] = None
    num_queues: Annotated[NonNegativeInt, WAITING] = 2

    def read(self, *, data_parallel: bool = False) -> Described:
        """The settings of the launch file and of the options; says on stderr what was taken of a file.

        Args:
            data_parallel: whether the trainer divides only data, so that where nothing says how the model is laid out,
                it is sharded over all GPUs, as many as the paper has.

        Raises:
            CliError: a file cannot be read, or a `--set` names no value.
        """
        data = copy.deepcopy(PAPER)
        said: set[str] = set()
        typed = {_FIELDS[name]: getattr(self, name) for name in _FIELDS if name in self.given}
        changes = dict(map(_change, self.changes))
        if self.launch_file is not None:
            launch = read_launch(self.launch_file)
            launch.complete(typed | changes, batch_given=self.global_batch is not None)
            print(*launch.lines(self.launch_file), sep="\n", file=sys.stderr)
            said |= launch.settings.keys()
            for name, value in launch.settings.items():
                _put(data, name, value)
            if launch.kind and "model" not in said | typed.keys() | changes.keys():
                raise CliError(f"--from {self.launch_file}: does not say which model it trains; give --model")
        for name, value in (typed | changes).items():
            said.add(name)
            _put(data, name, value)
        if data_parallel and not any(name.split(".")[0] == "layout" for name in said):
            data["layout"] = dict(_SHARDED)
            data["gpus"] = data.get("gpus") or math.prod(PAPER["layout"].values())
        if "layout" in data and "layout.dp" not in said and data.get("gpus"):
            others = math.prod(_whole(data["layout"].get(axis, 1)) for axis in ("tp", "cp", "pp"))
            if others and data["gpus"] % others == 0:
                data["layout"]["dp"] = data["gpus"] // others
        if self.cost_file is not None:
            data["cost_model"] = self.from_file()
        if "gpu" in self.given:
            try:
                wlb_tools.Hardware.preset(str(self.gpu))
            except wlb.WlbError as unknown:
                raise CliError(f"--gpu {self.gpu}: {str(unknown).partition(': ')[2]}") from None
        path = data.get("kernel_model")
        if isinstance(path, str) and path.endswith(".json") and not Path(path).is_file():
            raise CliError(f"--kernel-profile {path}: no such file")
        model = data["model"]
        if isinstance(model, str):
            data["model"] = model_config(model, multi_token_prediction=self.multi_token_prediction)
        gpus, size = data.pop("gpus", None), data.pop("micro_batch_size", 1)
        name = model if isinstance(model, str) else ",".join(f"{key}={value}".lower() for key, value in model.items())
        return Described(data, frozenset(said), name, gpus, size, self.global_batch)


@dataclass(frozen=True)
class Described:
    """A scenario before it is checked.

    Attributes:
        data: see `wlb_tools.Scenario.from_dict`.
        said: settings that a file or the command line gives, such as "layout.tp".
        model_name: what `--model` says, or would say.
        gpus: number of GPUs, if it is given.
        size: sequences in a micro-batch.
        global_batch: its size, if it is given in tokens or samples.
    """

    data: dict[str, Any]
    said: frozenset[str]
    model_name: str
    gpus: int | None
    size: int
    global_batch: GlobalBatch | None

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return _whole(self.data["context"])

    @cached_property
    def layout(self) -> wlb_tools.ParallelLayout:
        """The layout.

        Raises:
            CliError: experts cannot be divided among these ranks; names sizes with which they can.
            WlbError: as `wlb_tools.ParallelLayout`.
        """
        sizes = self.data["layout"]
        try:
            return filled(wlb_tools.ParallelLayout, "layout", sizes)
        except wlb.WlbError as reason:
            ep = sizes.get("ep", 1)
            if reason.argument != "ep" or not isinstance(ep, int) or ep < 1:
                raise
            factor = ep // math.gcd(ep, sizes["dp"] * sizes["cp"])
            dp = setting("dp", sizes["dp"] * factor)
            less = {axis: sizes[axis] // factor for axis in ("tp", "pp") if sizes[axis] % factor == 0}
            fixes = [f"{setting(axis, size)} {dp}" for axis, size in less.items()]
            more = f"{dp} (on {factor} times as many GPUs)"
            raise CliError(f"{in_options(reason)}; it would with {', or with '.join([*fixes, more])}") from None

    def assumed(self) -> list[str]:
        """A sentence about what neither a file nor the command line gives, if it decides the answer; else nothing."""
        layout = self.data["layout"]
        sizes = " ".join(setting(axis, layout[axis]) for axis in ("tp", "cp", "pp", "dp"))
        said = any(name.split(".")[0] == "layout" for name in self.said)
        laid_out = self.gpus is not None or said
        sharded = " ".join(f"--set layout.{name}={layout[name]}" for name in ("fsdp", "recompute") if name in layout)
        parts = {
            f"--model {self.model_name}": "model" in self.said,
            sizes: laid_out,
            sharded: said or not sharded,
            f"--gpu {self.data['gpu']}": laid_out or bool(self.said & {"gpu", "hardware"}),
            f"--context {self.context}": "context" in self.said,
        }
        missing = [text for text, given in parts.items() if not given]
        return [f"Assumed, because nothing says otherwise: {listed(missing, ', ')}."] if missing else []

    def samples(self) -> int | None:
        """Sequences in a global batch, if `--global-batch` says it.

        Raises:
            CliError: it is no multiple of the context, or `--micro-batches` is given, too.
        """
        batch, context = self.global_batch, self.context
        if batch is None:
            return None
        if "num_micro_batches" in self.said:
            raise CliError("--micro-batches: --global-batch says how large a global batch is; leave this out")
        if batch.unit == "samples":
            return batch.count
        if batch.count < context:
            raise CliError(
                f"--global-batch {batch.count:,} tokens: is below --context {context:,}; samples are"
                f" --global-batch {batch.count}samples"
            )
        if batch.count % context:
            raise CliError(
                f"--global-batch {batch.count:,} tokens: is no multiple of --context {context:,}, which a sequence has"
            )
        return batch.count // context

    def scenario(self, *, chosen: bool = False) -> wlb_tools.Scenario:
        """The scenario.

        Args:
            chosen: whether the command chooses the tokens of a micro-batch; the scenario then has micro-batches of one
                sequence in a global batch of the same size.

        Raises:
            CliError: options contradict each other.
            WlbError: as `wlb_tools.Scenario.from_dict`.
        """
        layout = self.layout
        layout.check(world_size=self.gpus)
        size, samples = self.size, self.samples()
        if samples is not None and samples % size:
            said = f"--global-batch {self.global_batch}: {samples:,} sequences"
            raise CliError(f"{said} are no multiple of --micro-batch-size {size}")
        count = self.data.get("num_micro_batches") if samples is None else samples // size
        if chosen and size > 1:
            count, size = (count or layout.pp * layout.dp) * size, 1
        more = {"layout": layout, "num_micro_batches": count, "context": self.context * size}
        return wlb_tools.Scenario.from_dict(self.data | more)

    def search(self) -> dict[str, Any]:
        """Arguments of `wlb_tools.simulation.search_layouts`, except the layout and the global batch."""
        searched = arguments(self.data, wlb_tools.Scenario)
        for name in ("layout", "num_micro_batches", "outlier_thresholds"):
            searched.pop(name, None)
        return searched


def described(scenario: wlb_tools.Scenario) -> Settings:
    """A scenario's plain settings by name, as a report lists them."""
    layout = {field.name: getattr(scenario.layout, field.name) for field in dataclasses.fields(scenario.layout)}
    found = {field.name: getattr(scenario, field.name) for field in dataclasses.fields(scenario)}
    named = {"model": scenario.model.name, "gpu": scenario.hardware.name, "kernel_model": scenario.attention.source}
    return {
        name: listed(value, ", ") if isinstance(value, tuple) else value
        for name, value in (found | layout | named).items()
        if value is None or isinstance(value, bool | int | float | str | tuple)
    }


def _change(text: str) -> tuple[str, Any]:
    """The setting and the value of a `--set`: a number, true, false, a list in brackets, or text."""
    name, has, value = text.partition("=")
    if not has or not name.strip():
        raise CliError(f"--set {text}: must be NAME=VALUE, such as layout.fsdp=zero3")
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value.strip()


def _put(data: dict[str, Any], name: str, value: Any) -> None:
    *tables, last = name.split(".")
    for table in tables:
        if not isinstance(data.get(table), dict):
            data[table] = {}
        data = data[table]
    data[last] = value


def _whole(value: Any) -> int:
    """A whole number, or 1: what is no number is refused later, by name."""
    return value if isinstance(value, int) and value > 0 else 1
