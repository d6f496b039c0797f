"""A run on disk: its folder, its ledger, and the guarantee that is derived from them."""
