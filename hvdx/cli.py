"""The command `hvdx`: the version, the variables in force, what `doctor` finds here, and `plan`, scaling on paper."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdx import environment
from hvdx.errors import ConfigurationError
from hvdx.launch.doctor import Check, State, report
from hvdx.planning import command as planning
from hvdx.planning.predict import predict
from hvdx.version import __version__

_COLOURS = {State.FINE: "green", State.NOTE: "dim", State.BAD: "bold red"}


def origin(variable: environment.Variable, environ: Mapping[str, str]) -> str:
    """Return which name a variable's value comes from, or "default"."""
    return variable.source(environ) or "default"


def environment_table(environ: Mapping[str, str]) -> tuple[Table, bool]:
    """Return the table of all variables with the values in force, and whether each of them can be used."""
    table = Table("variable", "value", "from", "meaning", title="Environment variables of hvdx")
    usable = True
    for variable in environment.ALL:
        source = origin(variable, environ)
        try:
            value = str(variable.read(environ))
        except ConfigurationError:
            usable = False
            value = f"[bold red]{escape(environ[source])}: cannot be used[/]"
        else:
            value = escape(value)
        meaning = variable.meaning + (f" (or {variable.horovod})" if variable.horovod else "")
        table.add_row(variable.name, value, source, escape(meaning))
    return table, usable


def doctor_table(checks: Sequence[Check]) -> Table:
    """Return the table of what was found."""
    table = Table("check", "", "found", title="hvdx doctor")
    for check in checks:
        colour = _COLOURS[check.state]
        table.add_row(check.name, f"[{colour}]{check.state.value}[/]", escape(check.found))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 1 when something found would make training fail."""
    parser = argparse.ArgumentParser(prog="hvdx", description="Looks at hvdx and this machine; hvdxrun starts ranks.")
    parser.add_argument("--version", action="version", version=f"hvdx {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="the environment variables, their values in force and where these come from")
    commands.add_parser("doctor", help="what is installed and whether two ranks can start; exit code 1 if not")
    plan = commands.add_parser("plan", help="how long a step will take on many ranks", description=planning.DESCRIPTION)
    planning.add_options(plan)
    args = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 140)
    if args.command == "env":
        table, usable = environment_table(os.environ)
        console.print(table)
        return 0 if usable else 1
    if args.command == "plan":
        try:
            job = planning.job_of(args)
        except ConfigurationError as error:
            plan.error(str(error))
        predictions = predict(job)
        console.print(planning.table(job, predictions))
        console.print(escape(planning.closing(job, predictions)), highlight=False)
        return 0
    checks = report()
    console.print(doctor_table(checks))
    bad = [check.name for check in checks if check.state is State.BAD]
    console.print(
        f"In the way of training: {', '.join(bad)}." if bad else "Ready: training with several ranks can start."
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
