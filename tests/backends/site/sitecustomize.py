"""Python imports this module at start-up in the processes a program under test starts.

They get the same backend, watched the same way, as the program itself.
"""

import os
import sys
from pathlib import Path

# Multiprocessing's own helper is no part of the program.
is_helper = any("multiprocessing.resource_tracker" in argument for argument in sys.orig_argv)

if (name := os.environ.get("TPUMIGRATE_TEST_BACKEND")) and not is_helper:
    tests = str(Path(__file__).resolve().parents[2])
    sys.path.insert(0, tests)
    from backends import backend

    sys.path.remove(tests)
    backend.load(name)
    backend.start_recording(name)
