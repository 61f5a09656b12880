"""Reads launch files as settings of a scenario: Megatron's arguments, torchtitan's, axolotl's, LLaMA-Factory's.

Every key of a file is taken, or left out with the reason. A scenario's own TOML is read as it stands.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.launch.fine_tuning import AXOLOTL, LLAMA_FACTORY, fine_tuning
from wlb_tools.command.inputs.launch.megatron import flags_of_yaml, megatron
from wlb_tools.command.inputs.launch.settings import Launch
from wlb_tools.command.inputs.launch.texts import flags_of, flat, tables
from wlb_tools.command.inputs.launch.torchtitan import torchtitan
from wlb_tools.simulation import Scenario


def read_launch(path: Path) -> Launch:
    """Settings that a launch file gives.

    Raises:
        CliError: it cannot be read, or its trainer is unknown, or it is a script that computes them.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise CliError(f"--from {path}: cannot be read: {problem}") from None
    content = tables(path, text)
    if content is None:
        flags, variables = flags_of(path, text)
        if {"num-layers", "seq-length", "tensor-model-parallel-size"} & flags.keys():
            return megatron(flags, variables)
        raise CliError(f"--from {path}: {_UNKNOWN}")
    keys = dict(flat(content))
    if any(_OF_TITAN.fullmatch(key) for key in keys):
        return torchtitan(content)
    if "base_model" in content:
        return fine_tuning(content, AXOLOTL, path)
    if {"stage", "finetuning_type", "cutoff_len"} & content.keys():
        return fine_tuning(content, LLAMA_FACTORY, path)
    if "ModelParallel" in content or "MODEL_ARGS" in content:
        return megatron(flags_of_yaml(content), {})
    if content.keys() & _OF_SCENARIO:
        return Launch("", settings=keys)
    found = ", ".join(map(str, itertools.islice(content, 8)))
    raise CliError(f"--from {path}: {_UNKNOWN}; found are {found or 'no keys'}")


_UNKNOWN = (
    "has none of what is known: Megatron's arguments, as a script, a list or YAML (MODEL_ARGS); torchtitan's"
    " configuration, as TOML or resolved as JSON (training.seq_len, parallelism.tensor_parallel_degree); axolotl's YAML"
    " (base_model); LLaMA-Factory's (stage, cutoff_len); a scenario of wlb as TOML (model, layout)"
)


_OF_TITAN = re.compile(
    r"(parallelism|training|experimental)\.\w+_parallel_(shard_|replicate_)?degree"
    r"|training\.(seq_len|local_batch_size|global_batch_size)|model\.flavor"
)
"""Keys of torchtitan's configuration, of which a file must have one to be taken for it."""


_OF_SCENARIO = {*Scenario.__dataclass_fields__, "gpu", "gpus"}
