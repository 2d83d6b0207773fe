"""Figures that the project stands by, and the programs that make them."""
