"""Merging the weights of several models: arithmetic on one tensor of each."""
