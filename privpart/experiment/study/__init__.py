"""Study: compare parts of a model under privacy, each with values tuned by the same budget."""
