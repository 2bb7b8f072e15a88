"""gradsync as a backend of ``torch.distributed``: ``init_process_group("gradsync")``."""
