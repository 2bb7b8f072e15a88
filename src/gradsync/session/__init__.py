"""The composition root: the only layer that knows rendezvous, backends and groups together."""
