"""Starting the ranks of a job on this host: ``spawn`` for a function, ``run`` for a command."""
