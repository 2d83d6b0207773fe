"""Keeping to a budget of likelihood evaluations: how many particles what is left pays for."""

from dataclasses import dataclass

import numpy as np

from pmd.moves import AUDITED
from pmd.plan import Plan

SCALED = 2.0  # evaluations that put the last particles on the scale of the pooled draws
LEAST = 8  # particles; with fewer nothing can be fitted


@dataclass(frozen=True)
class Budget:
    """A plan's budget; every answer is about what is left after `spent` evaluations."""

    plan: Plan
    num_particles: int

    @property
    def limited(self) -> bool:
        """Whether there is a budget at all."""
        return self.plan.evaluations is not None

    def left(self, spent: float) -> float:
        """Evaluations left, but for those of the end: minibatch noise, the pool's scale."""
        budget = self.plan.evaluations
        if budget is None:
            return np.inf
        kept = SCALED if self.plan.full_passes else min(AUDITED, budget / 2)
        return budget - kept - spent

    def ahead(self, visited: int) -> tuple[float, float]:
        """Passes on minibatches and steps on all rows that the plan still asks for."""
        minibatches = max(0, self.plan.budget - visited) / self.plan.num_data
        full = max(0, visited - self.plan.budget) / self.plan.num_data
        return minibatches, max(0.0, self.plan.full_passes - full)

    def allowance(self, spent: float, visited: int, count: int) -> float:
        """What checks may cost, so that the rest of the plan can be paid with `count` particles."""
        minibatches, full = self.ahead(visited)
        return self.left(spent) - minibatches * count - full * self.num_particles

    def affordable(self, wanted: int, spent: float, visited: int) -> int:
        """At most `wanted` particles: as many as the rest of the plan can be paid with."""
        if not self.limited:
            return wanted
        minibatches, full = self.ahead(visited)
        if minibatches > 0:
            most = (self.left(spent) - full * self.num_particles) / minibatches
        else:
            most = self.left(spent) / max(full, 1.0)
        return int(max(min(wanted, most), LEAST))

    def pays(self, cost: float, spent: float) -> bool:
        """Whether something extra can be paid."""
        return cost <= self.left(spent)
