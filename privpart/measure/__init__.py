"""What training takes from a client, and what it does to a network."""
