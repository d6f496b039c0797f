"""``privpart audit``: attack what a client sends."""

import typer

from privpart.cli.audit import defences, leakage
from privpart.cli.idle import Command

app = typer.Typer(help="Attack what a client sends.", no_args_is_help=True)
app.command(cls=Command)(defences.defences)
app.command(cls=Command)(leakage.leakage)
