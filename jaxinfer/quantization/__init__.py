"""Methods that choose the codes of weights in few bits, beyond rounding each to the nearest."""
