"""New rows for a posterior that is there: the recursion goes on from q."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pmd.errors import InputError
from pmd.fitting import fit
from pmd.posterior import Posterior
from pmd.problem import Problem

PyTree = Any


def update(
    posterior: Posterior, data: PyTree, problem: Problem | None = None, **options: Any
) -> Posterior:
    """The posterior after new rows, with the fitted density of the old ones as prior.

    The old rows are not needed again; they enter as the density fitted to them, whose error the
    certificate of the new posterior therefore repeats.

    Args:
        posterior: a posterior with a density.
        data: the new rows.
        problem: needed for a posterior that was loaded.
        options: for `pmd.fit`.
    """
    problem = posterior.problem if problem is None else problem
    if problem is None:
        raise InputError("this posterior was loaded from a file: give update its problem=")
    if posterior.density is None:
        posterior = posterior.kernel_estimate()
    new = fit(as_prior(posterior, problem), data, **options)
    before = posterior.certificate
    evidence = new.log_evidence + posterior.log_evidence
    error = float(np.hypot(new.log_evidence_error, posterior.log_evidence_error))
    certificate = replace(
        new.certificate,
        log_evidence=evidence,
        log_evidence_error=error,
        earlier_verdict=before.verdict,
        earlier_error=before.fit_error,
    )
    return new.replace(
        problem=problem, log_evidence=evidence, log_evidence_error=error, certificate=certificate
    )


def as_prior(posterior: Posterior, problem: Problem) -> Problem:
    """The problem of further rows: the posterior's density in the place of the prior."""
    structure, density = posterior.structure, posterior.density
    traced = getattr(density, "log_prob_traced", density.log_prob)

    def flat_density(parameter: PyTree, log_density: Any) -> Array:
        vector = structure.ravel(parameter)
        return log_density(vector[None])[0] - structure.log_det(vector)

    def sample(key: Array) -> PyTree:
        return structure.unravel(sample_proposal(density, key))

    proposal = getattr(density, "log_proposal_traced", traced)
    return Problem(
        log_prior=lambda parameter: flat_density(parameter, traced),
        log_likelihood=problem.log_likelihood,
        sample_prior=sample,
        log_likelihood_batch=problem.log_likelihood_batch,
        constraints=problem.constraints,
        start=(sample, lambda parameter: flat_density(parameter, proposal)),
    )


def sample_proposal(density: Any, key: Array) -> Array:
    """One draw, traceable, of the density that draws of a fitted density come from."""
    from pmd.densities import mixture

    drawn_from = getattr(density, "proposal", None)
    if drawn_from is None:
        return density.draw(key, 1).theta[0]
    mix = jax.tree.map(lambda a: jnp.asarray(a, jnp.zeros(()).dtype), drawn_from)
    return mixture.sample(key, mix, 1)[0]
