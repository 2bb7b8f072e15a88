"""Key-value stores through which ranks find each other."""
