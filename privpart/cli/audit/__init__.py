"""``privpart audit``: attack what a client sends, and measure what a server adds."""

import typer

from privpart.cli.audit import epsilon, leakage
from privpart.cli.idle import Command

app = typer.Typer(help="Attack what a client sends; measure epsilon.", no_args_is_help=True)
app.command(cls=Command)(epsilon.epsilon)
app.command(cls=Command)(leakage.leakage)
