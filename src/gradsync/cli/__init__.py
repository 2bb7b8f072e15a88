"""The command line of gradsync."""
