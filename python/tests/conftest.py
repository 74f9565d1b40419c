"""Tests of `parallelize` need torch and transformers; the others do not."""

import importlib.util
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None:
    collect_ignore = ["test_parallelize.py", "test_training.py", "test_refusals.py"]
