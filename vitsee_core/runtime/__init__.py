"""Execution: images, devices, threads, processes, clusters, memory and progress."""
