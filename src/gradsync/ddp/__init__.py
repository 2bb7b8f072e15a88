"""Data-parallel training: buckets of gradients, reduced while backward goes on."""
