"""`python -m ac_recipes`, the command line."""

import sys

from ac_recipes.cli import main

sys.exit(main())
