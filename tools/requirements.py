"""Print what pyproject.toml asks for: the package's dependencies and those of the extras named.

    python tools/requirements.py dev

So that they can be installed while the core is being compiled.
"""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # scikit-build-core brings it along

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
wanted = [*project["dependencies"]]
for extra in sys.argv[1:]:
    wanted += project["optional-dependencies"][extra]
print("\n".join(wanted))
