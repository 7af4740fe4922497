"""Conversion: replace the norms and heads of a network by those of M members, and take them out."""
