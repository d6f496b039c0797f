"""A noise source of zeros: shows what the noiseless part of a server or a histogram does."""


class NoNoise:
    """Draws zeros, and records the standard deviation that it was asked for, in steps."""

    private, identity = False, "zeros"

    def claim(self, stream):
        pass

    def salt(self):
        return b""

    def draws(self, stream, salt):
        return self

    def rounded(self, index, start, out, *, weight, offset=None, largest=0.0):
        self.stddev = weight
        out[:] = 0
