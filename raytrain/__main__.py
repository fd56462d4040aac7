"""`python -m raytrain`: the command, also where raytrain is not installed but lies in the working directory."""

import sys

from raytrain.cli.app import run

sys.exit(run())
