"""Clients and their examples."""
