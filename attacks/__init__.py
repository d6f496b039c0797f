"""What an adversary gets from an update."""
