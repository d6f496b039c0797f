"""A run on disk: its folder, its ledger, and what is proved from them."""
