"""Tests of PDSL. A package, so that worker processes can import test modules by name."""
