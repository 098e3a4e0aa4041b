"""`python -m mlxserve` is the command `mlxserve`."""

import sys

from mlxserve.cli.main import main

sys.exit(main())
