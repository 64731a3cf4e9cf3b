"""Print what a pyproject.toml asks for, so that an image can install it before it has the sources.

Usage: python requirements.py pyproject.toml [EXTRA ...]
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
extras = [project["optional-dependencies"][extra] for extra in sys.argv[2:]]
print(*project["dependencies"], *(requirement for extra in extras for requirement in extra), sep="\n")
