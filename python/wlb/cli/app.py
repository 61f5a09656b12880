"""The commands under one name, and the way their errors leave."""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import wlb
from wlb.cli.commands.audit import audit
from wlb.cli.commands.demo import demo
from wlb.cli.commands.pack import pack
from wlb.cli.commands.profile import profile
from wlb.cli.commands.simulate import simulate
from wlb.cli.commands.tune import tune
from wlb.cli.inputs.options import as_options
from wlb.cli.output.console import CliError, readable
from wlb.cli.reproduce import reproduce

app = typer.Typer(
    name="wlb",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"wlb {wlb.__version__}")
        raise typer.Exit


@app.callback()
def wlb_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Packs documents into micro-batches of equal work for LLM training.

    Start with `wlb demo`: it needs nothing but the Python files of this machine.
    """


app.command()(demo)
app.command()(pack)
app.command()(profile)
app.command()(tune)
app.command()(simulate)
app.command()(reproduce)
app.command()(audit)


def run(argv: Sequence[str]) -> None:
    """Runs the command and exits: 0 done, 1 what was audited does not hold, 2 wrong input (one line on stderr)."""
    try:
        app(args=list(argv), prog_name="wlb", obj=[readable(word) for word in argv])
    except wlb.WlbError as error:
        print(f"wlb: {as_options(str(error))}", file=sys.stderr)
        sys.exit(2)
    except (CliError, OSError) as error:
        print(f"wlb: {error}", file=sys.stderr)
        sys.exit(2)
