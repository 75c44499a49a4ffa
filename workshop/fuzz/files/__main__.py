"""`python -m workshop.fuzz.files`: see `run.py`."""

import sys

from workshop.fuzz.files.run import main

sys.exit(main())
