"""Measure the chains against their peers: check first, then time, then report. Run it with ``python -m bench``."""
