"""The version, and nothing else, so that the build reads it without imports."""

__version__ = "0.1.0"
