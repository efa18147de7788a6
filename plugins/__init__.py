"""Parts that a configuration may swap in; each could stand in a package of its own."""
