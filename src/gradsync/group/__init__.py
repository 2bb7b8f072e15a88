"""Process groups and the collectives on them."""
