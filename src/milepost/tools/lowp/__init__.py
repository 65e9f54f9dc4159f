"""Low-precision numbers: elements, block scales, and the dialects in which files hold them."""
