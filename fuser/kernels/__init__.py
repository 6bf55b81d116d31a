"""One fusion as kernels: specialised by layout and size, lowered, printed, compiled, launched."""
