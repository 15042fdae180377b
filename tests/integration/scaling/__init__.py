"""Replicas that join and leave. ``FAULTS`` names the directory in which `mortal` replicas find what they die of."""

FAULTS = "WARMPATH_TEST_FAULTS"
