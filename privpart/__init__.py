"""Training part of a model under differential privacy."""
