"""Lower bounds on epsilon: canaries, replays of a run, and the bounds that they give."""
