"""Saving and loading: equal to the last bit, open to other readers, and clear about bad files."""

import contextlib
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from known import COV, MEAN, certificate, gaussian_posterior, gaussians, weighted
from scipy.io import netcdf_file

from pmd import storage
from pmd.errors import InputError
from pmd.posterior import Posterior
from pmd.storage import from_json, load, to_json
from pmd.structure import Structure


class Packed:
    """A density of arrays of every kind."""

    error = math.nan
    num_components = 1

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays = arrays

    def pack(self) -> dict[str, np.ndarray]:
        return self.arrays


ARRAYS = {
    "wide": np.random.default_rng(0).normal(size=(4, 3, 3)),
    "narrow": np.random.default_rng(1).normal(size=7).astype(np.float32),
    "odd": np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324]),
    "whole": np.array([1, -2, 2**31 - 1], np.int32),
    "long": np.array([[2**62, -(2**62)]]),
    "bits": np.array([0, 2**32 - 1], np.uint32),
    "yes": np.array([True, False]),
    "one": np.array(3.25),
    "none": np.zeros((0, 5)),
    "kind": np.array("poly4+rbf1.5 — ω"),
    "blank": np.array(""),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
}


@pytest.fixture
def posterior(monkeypatch: pytest.MonkeyPatch) -> Posterior:
    monkeypatch.setattr(storage, "unpack", Packed)
    history = [
        {"kind": "step", "pass": 0.1 + 0.2, "rows": np.int64(5), "ess": jnp.float32(0.1)},
        {"kind": "move", "audit": math.nan, "worst": -math.inf, "names": ("a", None), "ok": True},
    ]
    return gaussian_posterior(
        m=200,
        density=Packed(ARRAYS),
        history=history,
        log_evidence=-1 / 3,
        certificate=certificate(unseen_mass=math.nan, warnings=("said — before",)),
    )


def test_a_round_trip_is_exact_to_the_bit(posterior: Posterior, tmp_path: Path) -> None:
    posterior.log_q[3] = -np.inf
    path = tmp_path / "posterior.nc"
    posterior.save(path)
    again = load(path)
    for name in ("theta", "log_q", "log_p0"):
        assert getattr(again, name).tobytes() == getattr(posterior, name).tobytes()
    for name, array in ARRAYS.items():
        found = again.density.arrays[name]
        assert found.shape == array.shape
        assert found.dtype == array.dtype
        assert found.tobytes() == array.tobytes()
    assert again.log_evidence == posterior.log_evidence
    assert again.settings == posterior.settings
    assert str(again.certificate) == str(posterior.certificate)
    assert again.certificate.warnings == ("said — before",)
    assert again.names == posterior.names
    assert again.history[0]["pass"] == 0.1 + 0.2
    assert again.history[0]["ess"] == float(jnp.float32(0.1))
    assert math.isnan(again.history[1]["audit"])
    assert again.history[1]["worst"] == -math.inf
    assert again.history[1]["names"] == ["a", None]
    # The same file from what was read: nothing was lost on the way.
    again.save(tmp_path / "again.nc")
    assert (tmp_path / "again.nc").read_bytes() == path.read_bytes()


def test_estimates_of_a_loaded_posterior_are_the_same(tmp_path: Path) -> None:
    original = gaussian_posterior(m=300)
    original.save(tmp_path / "p.nc")
    again = load(str(tmp_path / "p.nc"))
    assert np.array_equal(again.mean(), original.mean())
    assert np.array_equal(again.sample(50, seed=3), original.sample(50, seed=3))
    assert str(again) == str(original)


def test_other_readers_find_particles_and_weights(posterior: Posterior, tmp_path: Path) -> None:
    posterior.save(tmp_path / "p.nc")
    with netcdf_file(tmp_path / "p.nc", mmap=False) as file:
        assert file.variables["theta"].dimensions == ("particle", "coordinate")
        assert np.array_equal(file.variables["theta"][...], posterior.theta)
        assert json.loads(file.names) == ["theta[0]", "theta[1]"]
        assert json.loads(file.certificate)["unseen_mass"] == {"float": "nan"}


def test_atoms_without_a_density(tmp_path: Path) -> None:
    atoms = gaussian_posterior(m=50, atoms=True)
    atoms.save(tmp_path / "p.nc")
    again = load(tmp_path / "p.nc")
    assert again.atoms
    assert again.density is None


def test_constrained_and_nested_parameters(tmp_path: Path) -> None:
    library = pytest.importorskip("numpyro.distributions")
    shapes = {
        "a": [jax.ShapeDtypeStruct((2,), jnp.float32)],
        "s": jax.ShapeDtypeStruct((), jnp.float32),
    }
    structure = Structure.of(shapes, {"s": library.constraints.positive})
    theta = np.random.default_rng(0).normal(size=(40, 3))
    original = weighted(theta, np.zeros(40), np.zeros(40), structure=structure)
    original.save(tmp_path / "p.nc")
    mean = load(tmp_path / "p.nc").mean()
    assert np.array_equal(mean["a"][0], original.mean()["a"][0])
    assert mean["s"] == original.mean()["s"] > 0


def test_bad_files_are_told_apart(posterior: Posterior, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "p.nc"
    with pytest.raises(InputError, match="there is no such file"):
        load(path)
    for content in (b"", b"hello, world", b"\x89HDF\r\n\x1a\n" * 9):
        path.write_bytes(content)
        with pytest.raises(InputError, match="not a file that"):
            load(path)
    with netcdf_file(path, "w") as file:
        file.history = "somebody else's"
    with pytest.raises(InputError, match="not a file that"):
        load(path)
    posterior.save(path)
    whole = path.read_bytes()
    for end in (4, 40, 1000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(InputError, match=r"damaged|not a file that"):
            load(path)
    for place in range(200, len(whole), 211):
        changed = bytearray(whole)
        changed[place] ^= 4
        path.write_bytes(changed)
        with contextlib.suppress(InputError):  # and no other error; some bytes are padding
            load(path)
    monkeypatch.setattr(storage, "VERSION", 99)
    posterior.save(path)
    monkeypatch.setattr(storage, "VERSION", 1)
    with pytest.raises(InputError, match="newer pmd"):
        load(path)


def test_one_flipped_bit_of_the_data_is_found(posterior: Posterior, tmp_path: Path) -> None:
    path = tmp_path / "p.nc"
    posterior.save(path)
    whole = bytearray(path.read_bytes())
    place = whole.find(posterior.theta[7:8, 1].astype(">f8").tobytes())
    whole[place + 3] ^= 1
    path.write_bytes(whole)
    with pytest.raises(InputError, match="damaged"):
        load(path)


def test_a_failed_save_leaves_the_old_file(
    posterior: Posterior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.nc"
    posterior.save(path)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(storage.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        posterior.replace(log_evidence=5.0).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(InputError, match="does not exist"):
        posterior.save(tmp_path / "nowhere" / "p.nc")
    with pytest.raises(InputError, match="numbers and texts"):
        posterior.replace(settings={"function": len}).save(path)


def test_json_is_strict_and_keeps_every_float() -> None:
    value = {"a": [math.inf, -math.inf, 0.1, -0.0, 5e-324, 2**70], "b": {"c": None, "d": "ω"}}
    text = to_json(value)
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert from_json(text) == value
    assert text.isascii()


def test_a_problem_with_other_parameters_is_refused(posterior: Posterior, tmp_path: Path) -> None:
    import pmd

    def problem(dimension: int) -> pmd.Problem:
        return pmd.Problem(
            log_prior=lambda t: -0.5 * jnp.sum(t**2),
            log_likelihood=lambda t, row: -0.5 * (row - t[0]) ** 2,
            sample_prior=lambda key: jax.random.normal(key, (dimension,)),
        )

    posterior.save(tmp_path / "p.nc")
    right = problem(2)
    assert load(tmp_path / "p.nc", problem=right).problem is right
    with pytest.raises(InputError, match=r"problem= has parameters"):
        load(tmp_path / "p.nc", problem=problem(3))


def test_the_known_density_is_what_it_says() -> None:
    """The helper of these tests: its draws and weights give its mean."""
    density = gaussians(MEAN, COV)
    with jax.enable_x64(True):
        draws = density.draw(jax.random.key(0), 4000)
    w = np.exp(np.asarray(draws.log_q - draws.log_f, float))
    w /= w.sum()
    assert np.allclose(w @ np.asarray(draws.theta), MEAN, atol=4 * np.sqrt(2 * w @ w))
