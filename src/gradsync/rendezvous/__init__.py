"""PLACEHOLDER rendezvous."""
