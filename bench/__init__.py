"""Measure the chains against their peers: check first, then time, then report. Run it with ``python -m bench``."""

__distribution__ = "normfuse"  # by which it is told from another project's package of this name
