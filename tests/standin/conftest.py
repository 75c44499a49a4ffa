"""Tests on the stand-in device (`workshop/standin`), which must be there before torch is imported:

    python -m pytest -p workshop.standin.plugin tests/standin

Elsewhere they are not collected; `tests/test_standin.py` runs them in a process of its own.
"""

import sys

collect_ignore_glob = [] if "workshop.standin.plugin" in sys.modules else ["test_*.py"]
