"""The parts of the axis `growth`: what must not grow, each against what it could grow with."""
