"""Programs that mpirun and torchrun start, a process for each rank; tests import some, too."""
