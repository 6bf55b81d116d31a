"""Programs that mpirun and torchrun start as jobs, one process per rank; tests import some,
too.
"""
