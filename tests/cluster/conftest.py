"""Ray is imported here, where its own warnings are not ours."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        from ray import serve
    except ImportError:  # each file of tests says that it is skipped
        serve = None
