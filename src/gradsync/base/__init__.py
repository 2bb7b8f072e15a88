"""Small nouns that every layer shares; no torch, no I/O."""
