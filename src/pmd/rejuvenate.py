"""When the particles move: under which effective sample size, as a share of their number."""

from dataclasses import dataclass

from pmd.errors import InputError, InputTypeError


@dataclass(frozen=True)
class Rejuvenate:
    """Particles move when their effective sample size falls below `ess` times their number.

    At 0 they never do; above 1 they are drawn anew before every step.
    """

    ess: float

    @property
    def always(self) -> bool:
        """Whether particles are drawn anew at every step."""
        return self.ess > 1

    @property
    def never(self) -> bool:
        """Whether particles stay where the start put them."""
        return self.ess <= 0

    @property
    def papers(self) -> bool:
        """Whether this is one of the paper's own strategies, which run without a guard."""
        return self.never or self.always

    def at(self, passes: float) -> "Rejuvenate":
        """What holds after so many passes through the data."""
        del passes
        return self


@dataclass(frozen=True)
class Switch:
    """One policy until `after` passes through the data, another from then on."""

    first: Rejuvenate
    then: Rejuvenate
    after: float
    num_particles: tuple[int, int] | None = None

    def at(self, passes: float) -> Rejuvenate:
        """What holds after so many passes through the data."""
        return self.first if passes < self.after else self.then

    @property
    def always(self) -> bool:
        """Whether particles are drawn anew at every step all along."""
        return self.first.always and self.then.always

    @property
    def never(self) -> bool:
        """Whether particles stay where the start put them all along."""
        return self.first.never and self.then.never

    @property
    def papers(self) -> bool:
        """The paper's strategy in practice: without a guard."""
        return True


Policy = Rejuvenate | Switch


def never() -> Rejuvenate:
    """Particles stay where the prior put them: the paper's strategy 1, `weighted_particle`."""
    return Rejuvenate(0.0)


def every_step() -> Rejuvenate:
    """Particles are drawn anew before every step: the paper's strategy 2, `weighted_kde`."""
    return Rejuvenate(float("inf"))


def when_degenerate(ess: float = 0.5) -> Rejuvenate:
    """Particles move when the effective sample size is below `ess` times their number."""
    if not 0 < ess < 1:
        raise InputError(f"ess must lie between 0 and 1, got {ess}: a share of the particles")
    return Rejuvenate(ess)


def switch(
    first: Rejuvenate,
    then: Rejuvenate,
    *,
    after: float,
    num_particles: tuple[int, int] | None = None,
) -> Switch:
    """One policy for a while, then another: the paper's 'in practice' (section 3.3).

    Args:
        first: until `after` passes, usually `every_step()`.
        then: from then on, usually `never()`.
        after: in passes through the data.
        num_particles: (few, many): few particles while they move, many once they stay.

    Example:
        >>> import pmd
        >>> pmd.switch(pmd.every_step(), pmd.never(), after=0.5, num_particles=(200, 1500)).after
        0.5
    """
    for name, policy in (("first", first), ("then", then)):
        if not isinstance(policy, Rejuvenate):
            raise InputTypeError(
                f"{name} must be a policy such as pmd.never() or pmd.every_step(), got {policy!r}"
            )
    if not after > 0:
        raise InputError(f"after must be a positive number of passes, got {after}")
    if num_particles is not None and (len(num_particles) != 2 or min(num_particles) < 1):
        raise InputError(f"num_particles must be (few, many), both positive, got {num_particles}")
    return Switch(first, then, float(after), num_particles)
