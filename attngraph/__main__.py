"""`python -m attngraph`: the command line."""

import sys

from attngraph.cli import main

sys.exit(main())
