"""Reads and writes the HDF5 files of trajectories and of columns added to them."""
