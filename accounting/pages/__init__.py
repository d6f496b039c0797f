"""Pages and pictures: what every picture and every HTML page of the three packages shares.

Nothing else of this package imports it, so that a budget in a terminal loads neither matplotlib nor
jinja2.
"""
