"""Supercomputers: everything that is special about a computing centre."""
