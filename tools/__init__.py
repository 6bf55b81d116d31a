"""Tools of the repository that are larger than a script; no package of the product imports them."""
