"""Flower: the same server and clients over a network, by Flower's messages (flwr 1.42).

This is the only folder that imports flwr, and only inside functions: privpart works without it.
"""
