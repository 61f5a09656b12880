"""`wlb doctor`: what works on this machine, and what to do about the rest."""

from __future__ import annotations

import sys
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import wlb
from wlb_tools.command.inputs.options import OUTPUT
from wlb_tools.command.output.console import Printing
from wlb_tools.command.output.render import machine
from wlb_tools.command.output.report import Block, Paragraphs, Report, Table

if TYPE_CHECKING:
    from wlb_tools.command import checkup


def doctor(*, printing: Annotated[Printing, OUTPUT] = Printing()) -> None:
    """Tries what wlb needs on this machine: the engine, attention, the packages that it works with.

    Says what is wrong, and what to do about it. Every installed kernel of attention is compared with torch's own,
    document by document. Run it on each machine of a run: all must print the same digest of the plans. Exits with 1 if
    something is wrong; a package that is not installed is not wrong.
    """
    from wlb_tools.command import checkup  # here, because it takes a tenth of the start of every command

    wrong, sentences = [], []
    about = machine()
    sentences.append(
        f"wlb {wlb.__version__}, {wlb.BUILD_PROFILE} build, Python {about['python']}, numpy {about['numpy']};"
        f" {about['cpu']}, {about['cores']} processors."
    )
    if wlb.BUILD_PROFILE != "release":
        wrong.append("This is a debug build of wlb, many times slower: pip install .")
    with printing.progress() as bars:
        task = bars.add_task("plans", total=None)
        plans = checkup.digest_of_plans()
        sentences.append(f"Digest of its plans: {plans[:16]}.")
        if plans != checkup.PLANS:
            wrong.append(
                f"Plans differ from those of wlb {wlb.__version__} elsewhere (digest {checkup.PLANS[:16]}), and ranks"
                " on other machines would disagree. Take the same wheel on all; if they still differ, please report it."
            )
        bars.update(task, description="packages")
        packages = _packages(wrong)
        bars.update(task, description="attention")
        torch, attention = _training(wrong)
    sentences.append(torch)
    blocks: list[Block] = [
        Paragraphs(sentences),
        *_attention_table(attention),
        Table(
            "Packages",
            ("package", "installed", "needed", "for"),
            [(one.name, one.installed or "", one.needed or "any", one.use) for one in packages],
            strong={row for row, one in enumerate(packages) if one.installed and not one.works},
        ),
        Paragraphs([f"Wrong: {what}" for what in wrong] or ["Nothing is wrong."]),
    ]
    numbers = {
        "plans": plans,
        "packages": [asdict(one) for one in packages],
        "torch": torch,
        "attention": [asdict(one) | {"right": one.right} for one in attention],
        "wrong": wrong,
    }
    printing.give(Report(command="doctor", blocks=blocks, numbers=numbers))
    if wrong:
        sys.exit(1)


def _packages(wrong: list[str]) -> list[checkup.Package]:
    from importlib.metadata import PackageNotFoundError, version

    from wlb_tools.command import checkup

    try:
        installed = version("wlb")
    except PackageNotFoundError:
        wrong.append(
            "wlb lies on the path, but is not installed, and does not know which packages it needs: pip install ."
        )
        return []
    if installed != wlb.__version__:
        wrong.append(f"wlb {installed} is installed, and {wlb.__version__} was imported, from {wlb.__file__}.")
    found = list(checkup.packages())
    # A trainer may be installed for another purpose; wlb refuses it by name when it is used.
    wrong += [
        f'{one.name} {one.installed}: {one.needed} is needed; run: pip install "{one.name}{one.needed}"'
        for one in found
        if one.installed and not one.works and one.use.startswith("wlb")
    ]
    return found


def _training(wrong: list[str]) -> tuple[str, list[checkup.Attention]]:
    """A sentence about what can be trained here, and the checks of attention by kernel."""
    if find_spec("torch") is None:
        return 'No torch: plans alone. For wlb.torch: pip install "torch>=2.11"', []
    import torch
    import torch.distributed as dist

    from wlb_tools.command import checkup

    cuda = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    backends = [
        name for name in ("gloo", "nccl", "mpi", "ucc") if dist.is_available() and dist.is_backend_available(name)
    ]
    sentence = f"torch {torch.__version__} {cuda}, {', '.join(gpus) or 'no GPU'}"
    sentence += f"; collectives: {', '.join(backends) or 'none'}."
    wrong += checkup.broken_kernels()
    found: list[checkup.Attention] = []
    try:
        found += checkup.attention()
    except Exception as error:  # a kernel that was built for another system may raise anything
        wrong.append(f"Attention failed after {len(found)} kernels: {type(error).__name__}: {error}")
    wrong += [
        f"{one.kernel} on {one.device} in {one.dtype} is off by {max(one.forward, one.backward):.1g} of what is exact,"
        f' where {one.allowed:g} is allowed: give kernel="reference" or another, and please report it'
        for one in found
        if not one.right
    ]
    return sentence, found


def _attention_table(attention: list[checkup.Attention]) -> list[Table]:
    if not attention:
        return []
    columns = ("kernel", "on", "in", "forward off by", "backward", "allowed")
    rows: list[Any] = [
        (one.kernel, one.device, one.dtype, f"{one.forward:.1e}", f"{one.backward:.1e}", f"{one.allowed:.0e}")
        for one in attention
    ]
    return [
        Table(
            "Attention, beside torch's own of each document",
            columns,
            rows,
            strong={row for row, one in enumerate(attention) if not one.right},
        )
    ]
