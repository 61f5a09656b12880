"""All commands in one app, and the output of their errors."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence

from cyclopts import App, CycloptsError, Parameter

import wlb
from wlb_tools.command import help
from wlb_tools.command.commands.advise import advise
from wlb_tools.command.commands.audit import audit
from wlb_tools.command.commands.demo import demo
from wlb_tools.command.commands.doctor import doctor
from wlb_tools.command.commands.fit import fit
from wlb_tools.command.commands.lengths import lengths
from wlb_tools.command.commands.pack import pack
from wlb_tools.command.commands.profile import profile
from wlb_tools.command.commands.simulate import simulate
from wlb_tools.command.commands.tune import tune
from wlb_tools.command.errors import CliError, in_options, option
from wlb_tools.command.words import readable

app = App(
    name="wlb",
    help=(
        "Packs documents into micro-batches of equal work for LLM training.\n\n"
        "Start with `wlb demo`: it needs nothing but the Python files of this machine."
    ),
    version=f"wlb {wlb.__version__}",
    help_flags=["--help-all"],  # --help is `wlb_tools.command.help`
    version_flags=["--version"],
    help_format="plaintext",  # markdown takes a quarter of the start
    default_parameter=Parameter(name_transform=option, allow_repeating=True),
)
_COMMANDS: tuple[Callable[..., None], ...] = (
    demo,
    lengths,
    advise,
    pack,
    profile,
    fit,
    tune,
    simulate,
    audit,
    doctor,
)
for place, command in enumerate(_COMMANDS):
    app.command(command, sort_key=place, help_format="markdown")


def run(argv: Sequence[str]) -> None:
    """Runs the command and exits: 0 done, 1 an audit found something, 2 wrong input (one line on stderr)."""
    typed = argv
    try:
        if help.asked(argv) or not argv:
            print(help.short(app, help.command_of(app, argv)))
            sys.stdout.flush()
            sys.exit(0 if argv else 2)
        if "--help-all" in argv:
            print(help.examples(help.command_of(app, argv)), end="\n\n")
        called, bound, injected = app.parse_args(argv, print_error=False, exit_on_error=False)
        if "command_line" in injected:
            bound.arguments["command_line"] = shlex.join(["wlb", *map(readable, typed)])
        called(*bound.args, **bound.kwargs)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + getattr(signal, "SIGPIPE", 13))
    except wlb.WlbError as error:
        _refuse(in_options(error, _options(argv)))
    except CycloptsError as error:
        cause = error.__cause__
        _refuse(in_options(cause, _options(argv)) if isinstance(cause, wlb.WlbError) else str(error))
    except (CliError, OSError) as error:
        _refuse(str(error))
    sys.exit(0)


def _options(argv: Sequence[str]) -> set[str]:
    """The options of the command that these words call."""
    _, apps, _ = app.parse_commands(argv)
    return {
        name
        for argument in apps[-1].assemble_argument_collection(default_parameter=app.default_parameter)
        for name in argument.names
    }


def _refuse(message: str) -> None:
    print(f"wlb: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)
