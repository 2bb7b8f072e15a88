"""The kit for testing distributed code: ranks in milliseconds, faults as data, reports per rank."""
