"""Text: what an adversary reads in the update of a language model or a text classifier."""
