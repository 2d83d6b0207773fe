"""A run on rows that come in batches and cannot be read again: one step a batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmd.data.stream import Stream, padded_batch
from pmd.errors import InputError
from pmd.faults import not_finite
from pmd.mirror import step_batch
from pmd.plan import Plan
from pmd.problem import Flat
from pmd.run import Run

PyTree = Any


class StreamRun(Run):
    """Steps on batches as they come, with moves where the policy asks for them."""

    def __init__(
        self,
        flat: Flat,
        source: Stream,
        plan: Plan,
        seed: int,
        report: Callable[[Run, dict[str, Any]], None] | None = None,
    ):
        super().__init__(flat, None, plan, seed, report)
        self.source = source

    def minibatches(self) -> None:
        """One step a batch, until the planned rows are visited or the batches end."""
        room = 0
        for rows, size in self.source:
            if self.visited >= self.plan.budget:
                return
            room = max(room, size)
            policy = self.plan.rejuvenate.at(self.visited / self.plan.num_data)
            self.between(policy)
            if policy.always and self.plan.density.jittable and int(self.state.t):
                self.move(count=self.count_at(0))
            self.take(rows, size, room)
        if self.visited < min(self.plan.budget, self.plan.num_data):
            raise InputError(
                f"the batches ended after {self.visited} rows, but num_data={self.plan.num_data} "
                "were announced: give the number of rows there are"
            )

    def take(self, rows: PyTree, size: int, room: int) -> None:
        """One step on a batch."""
        kind = self.state.log_q.dtype
        g = self.plan.mixing(int(self.state.t), np.array([self.visited]), np.array([size]))[0]
        batch = padded_batch(rows, size, room, self.plan.num_data)
        count = int(self.state.count)
        self.state, info = step_batch(
            self.flat, self.mover.blocks, self.state, batch, self.plan.num_data,
            jnp.asarray(g, kind), jnp.asarray(self.floor(), kind),
        )  # fmt: skip
        self.book(jax.tree.map(lambda a: np.asarray(a, np.float64)[None], info), [count])
        if int(info.bad):
            raise not_finite(self, np.arange(size), rows)
        self.visited += size
        self.tell()
        self.limits()
