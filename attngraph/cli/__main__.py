"""`python -m attngraph.cli`."""

import sys

from attngraph.cli import main

sys.exit(main())
