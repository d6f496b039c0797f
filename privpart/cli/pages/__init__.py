"""Pages: the HTML form of what the commands print, and every picture of the commands."""
