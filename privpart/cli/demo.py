"""``privpart demo``."""


def demo() -> None:
    """Train."""
