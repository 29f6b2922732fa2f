"""Mappers: one method, one file, all through the contract in `kvbench.mappers.base`."""
