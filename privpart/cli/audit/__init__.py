"""``privpart audit``: attack what is sent and what is released; measure what a server adds."""

import typer

from privpart.cli.audit import epsilon, extraction, leakage, membership
from privpart.cli.idle import Command

app = typer.Typer(help="Attack what a client sends; measure epsilon.", no_args_is_help=True)
app.command(cls=Command)(epsilon.epsilon)
app.command(cls=Command)(leakage.leakage)
app.command(cls=Command)(membership.membership)
app.command(cls=Command)(extraction.extraction)
