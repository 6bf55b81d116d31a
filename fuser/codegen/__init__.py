"""From kernel loop nests to CUDA C++ text, and the device headers that it includes."""
