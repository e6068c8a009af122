"""Forebay: reinforcement-learning post-training of language models as a pipeline."""

__version__ = "0.1.0"
