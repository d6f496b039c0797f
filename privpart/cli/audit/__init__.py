"""``privpart audit``: attack what a client sends."""

import typer

from privpart.cli.audit import defences, leakage

app = typer.Typer(help="Attack what a client sends.", no_args_is_help=True)
app.command()(defences.defences)
app.command()(leakage.leakage)
