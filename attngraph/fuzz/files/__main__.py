"""`python -m attngraph.fuzz.files`: see `run.py`."""

import sys

from attngraph.fuzz.files.run import main

sys.exit(main())
