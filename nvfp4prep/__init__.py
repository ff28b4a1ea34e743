"""Prepare ModelOpt NVFP4 checkpoints so that inference engines agree on what they mean."""

__version__ = "0.1.0"
