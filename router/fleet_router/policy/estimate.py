"""A straight line learnt online: y = base + slope · x, from what the router sees. Pure, constant memory.

Least squares over a window that fades (half of it is forgotten in about 34 observations), pulled to a prior by the weight of
one observation, so that it means something from the first request on. One wild value moves it little: what lies above four
times the prediction counts as four times the prediction; what stays there is believed after a few.
"""

from __future__ import annotations

from typing import Final

KEEP: Final = 0.98
"""Weight that is left of the past at each observation."""
WILD: Final = 4.0
LEAST_SHARE: Final = 1e-3
"""Neither part falls below this share of its first prior: a cost of nothing would draw everything to one worker."""


class Line:
    """Seconds over some amount. `scale`: an amount of usual size, so that both parts weigh alike."""

    __slots__ = ("_least_slope", "_n", "_scale", "_sx", "_sxx", "_sxy", "_sy", "base", "prior_base", "prior_slope", "slope")

    def __init__(self, base: float, slope: float, scale: float) -> None:
        self._scale = scale
        self.base = self.prior_base = base
        self.slope = self.prior_slope = slope
        """Seconds per one of x."""
        self._least_slope = slope * LEAST_SHARE
        self._n = self._sx = self._sy = self._sxx = self._sxy = 0.0

    @property
    def weight(self) -> float:
        """Observations that still count."""
        return self._n

    def at(self, x: float) -> float:
        """Predicted seconds."""
        return self.base + self.slope * x

    def observe(self, x: float, y: float) -> None:
        """It took `y` seconds for `x`."""
        most = WILD * (self.base + self.slope * x)
        y = y if y < most else most
        x /= self._scale
        self._n = self._n * KEEP + 1.0
        self._sx = self._sx * KEEP + x
        self._sy = self._sy * KEEP + y
        self._sxx = self._sxx * KEEP + x * x
        self._sxy = self._sxy * KEEP + x * y
        self._solve()

    def relax(self, keep: float, prior: Line | None = None) -> None:
        """Time passes: what was seen counts less; `prior`: what is believed of such workers meanwhile."""
        if prior is not None:
            self.prior_base, self.prior_slope = prior.base, prior.slope
        self._n *= keep
        self._sx *= keep
        self._sy *= keep
        self._sxx *= keep
        self._sxy *= keep
        self._solve()

    def _solve(self) -> None:
        """Ridge regression towards the prior; neither part is negative."""
        pull_slope = self.prior_slope * self._scale
        n, sx, sxx = self._n + 1.0, self._sx, self._sxx + 1.0
        sy, sxy = self._sy + self.prior_base, self._sxy + pull_slope
        slope = (n * sxy - sx * sy) / (n * sxx - sx * sx)
        base = (sy - sx * slope) / n
        if base < 0.0:
            base, slope = 0.0, sxy / sxx
        elif slope < 0.0:
            base, slope = sy / n, 0.0
        slope, least = slope / self._scale, self._least_slope
        self.base, self.slope = base, slope if slope > least else least


class Mean:
    """A fading mean with a prior that weighs like four values."""

    __slots__ = ("_n", "_sum", "value")

    def __init__(self, prior: float) -> None:
        self._n, self._sum, self.value = 4.0, 4.0 * prior, prior

    def observe(self, value: float) -> None:
        """One more."""
        most = 16.0 * self.value + 1.0
        value = value if value < most else most
        self._n = self._n * KEEP + 1.0
        self._sum = self._sum * KEEP + value
        self.value = self._sum / self._n
