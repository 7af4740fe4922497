"""The ensemble of M members on one network: passes, predictions, features."""
