"""Pages: the HTML form of what the commands print; each is laid out by ``accounting.pages``."""
