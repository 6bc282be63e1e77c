"""What is left of the referee of `fit`: it goes with it. `aiscale verify` is in `measure`."""
