"""Where verification leaves a choice to a random number, in two readings.

`Coins` makes the choice that a request's numbers make (with a band: also those that rounding within it
may make, the exact one first); `Every` makes all of them, each with its probability. The walk of
oracles/verify.py is written once against both, so the law that is enumerated is the law of the very
decisions that the ops are compared with.

A choice is a list of (probability, value).
"""

import numpy as np

from specdec_ext._philox import ACCEPT, BONUS, RESIDUAL, SAMPLE, uniform

__all__ = ["ACCEPT", "BONUS", "RESIDUAL", "SAMPLE", "Coins", "Every"]


def draw(p, u, band=0.0):
    """Ids that the number u may draw from masses p: first the exact one, then (band > 0) those whose
    half-open bucket [cdf - p, cdf) lies within `band` of u. Ids of mass 0 never."""
    total = p.sum()
    cdf = np.cumsum(p) / total
    above = np.nonzero((cdf > u) & (p > 0))[0]
    exact = int(above[0]) if len(above) else int(np.nonzero(p > 0)[0][-1])
    if band == 0.0:
        return [exact]
    near = np.nonzero((p > 0) & (cdf - p / total - band <= u) & (u < cdf + band))[0]
    return [exact] + [int(v) for v in near if v != exact]


class Coins:
    def __init__(self, seed, position, band=0.0):
        self.seed, self.position, self.band = seed, position, band

    def accept(self, left, right, index):
        """Whether coin * left < right."""
        coin = uniform(self.seed, self.position, index, ACCEPT)
        yes = coin * left < right
        near = abs(coin * left - right) <= self.band * max(coin * left, right) and right > 0
        return [(1.0, yes)] + ([(1.0, not yes)] if self.band and near else [])

    def pick(self, masses, index):
        """Number of the first of some disjoint masses (of a total of 1) that the coin lies below,
        None when it lies above all."""
        coin = uniform(self.seed, self.position, index, ACCEPT)
        edges = np.cumsum([0.0, *masses])
        out = []
        for shift in (0.0, -self.band, self.band):
            inside = [
                i for i in range(len(masses)) if masses[i] > 0 and coin + shift < edges[i + 1]
            ]
            value = inside[0] if inside else None
            if value not in out:
                out.append(value)
        return [(1.0, value) for value in out]

    def draw(self, masses, purpose, index, mass=1.0, offset=0):
        """An id; `mass` is what the masses are known to sum to beside numbers of size 1, so that an
        error of band there is band / mass here."""
        u = uniform(self.seed, self.position + offset, index, purpose)
        return [(1.0, v) for v in draw(masses, u, self.band / max(mass, 1e-30))]


class Every:
    band = 0.0

    def accept(self, left, right, index):
        yes = 1.0 if left <= right else right / left
        return [(w, v) for w, v in ((yes, True), (1.0 - yes, False)) if w > 0]

    def pick(self, masses, index):
        rest = max(1.0 - sum(masses), 0.0)
        return [(m, i) for i, m in enumerate([*masses]) if m > 0] + ([(rest, None)] if rest else [])

    def draw(self, masses, purpose, index, mass=1.0, offset=0):
        total = masses.sum()
        return [(m / total, int(v)) for v, m in enumerate(masses) if m > 0]
