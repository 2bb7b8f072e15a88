"""``python -m gradsync`` is the command ``gradsync``."""

import sys

from gradsync.cli.main import main

sys.exit(main())
