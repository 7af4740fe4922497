"""Adapters to training frameworks; each module imports its framework when it is imported."""
