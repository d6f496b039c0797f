"""Settings: what a plan's tables say of a training, checked, and read without torch."""
