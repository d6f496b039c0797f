"""Reconstructions of inputs and labels from an update: closed forms and searches."""
