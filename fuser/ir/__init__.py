"""The fusion IR: dtypes, scalars, domains, tensors, ops and the fusion that holds them."""
