"""``python -m privpart``: the command line."""

from privpart.cli.main import main

main()
