"""The version of the project, which also tells results that older ones have kept on disk."""

__version__ = "0.1.0"
