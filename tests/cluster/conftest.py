"""Ray is imported here, where its own warnings are not ours. Its workers start when they are needed: those that it
starts ahead of need take a sixth of these tests' time.
"""

import os
import warnings

# read when Ray starts
os.environ |= {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        from ray import serve
    except ImportError:  # each file of tests says that it is skipped
        serve = None
