"""Capture and restore of live state: models, optimizers, everything with a state dict."""
