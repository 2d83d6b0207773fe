"""Posteriors on disk: NetCDF-3, which every scientific tool reads and which holds no code.

Particles, their log-densities and the arrays of the fitted density are variables; structure,
history, settings and certificate are attributes in JSON. A checksum over the variables tells of
damage. A file is written beside its place and renamed, so that a crash leaves the old one.
"""

import io
import json
import math
import os
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pmd.certificate import Certificate
from pmd.errors import InputError
from pmd.posterior import Posterior
from pmd.structure import Structure

if TYPE_CHECKING:
    from pmd.problem import Problem

FORMAT, VERSION = "pmd posterior", 1
PLAIN = ("theta", "log_q", "log_p0")
FIGURES = ("log_evidence", "log_evidence_error", "evaluations", "atoms")
TEXTS = ("structure", "names", "history", "settings", "certificate", "figures", "arrays")
NATIVE = ("float64", "float32", "int32", "int16", "int8")


def save(posterior: Posterior, path: str | os.PathLike[str]) -> None:
    """Write a posterior to a NetCDF file; an existing file is replaced in one step.

    Args:
        posterior: what `fit` returned.
        path: the file, by habit `posterior.nc`.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise InputError(f"path {str(path)!r}: the folder {str(path.parent)!r} does not exist")
    arrays = {name: getattr(posterior, name) for name in PLAIN}
    packed = {} if posterior.density is None else posterior.density.pack()
    arrays |= {f"density_{name}": np.asarray(value) for name, value in packed.items()}
    content = encode(arrays, describe(posterior))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], problem: "Problem | None" = None) -> Posterior:
    """Read a posterior that `posterior.save` wrote.

    Args:
        path: the file.
        problem: the problem it was fitted to; needed only to certify or to update it, and to
            restore parameters whose containers are not dicts, lists and tuples.

    Returns:
        the posterior, equal to the saved one to the last bit.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"path {str(path)!r}: there is no such file")
    texts, arrays = read(path)
    return restore(texts, arrays, problem)


def describe(posterior: Posterior) -> dict[str, str]:
    """What is saved beside the arrays, as text."""
    return {
        "structure": posterior.structure.to_json(),
        "names": to_json(posterior.names),
        "history": to_json(posterior.history),
        "settings": to_json(posterior.settings),
        "certificate": to_json(asdict(posterior.certificate)),
        "figures": to_json({name: getattr(posterior, name) for name in FIGURES}),
    }


def restore(
    texts: dict[str, str], arrays: dict[str, np.ndarray], problem: "Problem | None"
) -> Posterior:
    """A posterior from what a file holds."""
    names = from_json(texts["names"])
    if problem is None:
        structure = Structure.from_json(texts["structure"])
    else:
        structure = problem.flat().structure
    certificate = from_json(texts["certificate"])
    certificate["warnings"] = tuple(certificate["warnings"])
    prefix = "density_"
    packed = {k.removeprefix(prefix): a for k, a in arrays.items() if k.startswith(prefix)}
    posterior = Posterior(
        structure=structure,
        density=unpack(packed) if packed else None,
        certificate=Certificate(**certificate),
        history=from_json(texts["history"]),
        settings=from_json(texts["settings"]),
        problem=problem,
        **{name: arrays[name] for name in PLAIN},
        **from_json(texts["figures"]),
    )
    if posterior.names != names:
        raise InputError(f"problem= has parameters {posterior.names}, the saved posterior {names}")
    return posterior


def unpack(packed: dict[str, np.ndarray]) -> Any:
    """The fitted density of its arrays."""
    from pmd import densities

    return densities.unpack(packed)


def encode(arrays: dict[str, np.ndarray], texts: dict[str, str]) -> bytes:
    """A NetCDF-3 file (64-bit offsets) as bytes."""
    from scipy.io import netcdf_file

    buffer = io.BytesIO()
    out = netcdf_file(buffer, "w", version=2)
    kinds = {name: write(out, name, array) for name, array in arrays.items()}
    texts = texts | {"arrays": to_json(kinds)}
    whole = texts | {"format": FORMAT, "checksum": checksum(arrays, texts)}
    for name, value in whole.items():
        setattr(out, name, value)
    out.format_version = VERSION
    out.flush()
    return buffer.getvalue()


def write(out: Any, name: str, array: np.ndarray) -> list[Any]:
    """Add an array to a file and return its kind and shape; kinds NetCDF-3 lacks go as bytes."""
    kind = [array.dtype.name, list(array.shape)]
    if array.dtype.kind == "U":
        if array.ndim:
            raise InputError(f"{name}: only single strings can be saved, got {array!r}")
        kind[0] = "text"
        array = np.frombuffer(str(array).encode(), np.int8)
    elif array.dtype.name not in NATIVE:
        array = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.int8)
    array = np.atleast_1d(array)
    if not array.size:  # a dimension of length 0 would be read as the unlimited one
        return kind
    shared = ("particle", "coordinate")[: array.ndim]
    axes = shared if name in PLAIN else tuple(f"{name}_{i}" for i in range(array.ndim))
    for axis, length in zip(axes, array.shape, strict=True):
        if axis not in out.dimensions:
            out.createDimension(axis, length)
    out.createVariable(name, array.dtype, axes)[...] = array
    return kind


def read(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Texts and arrays of a file, with the ways in which it may be wrong told apart."""
    from scipy.io import netcdf_file

    damaged = InputError(f"{path} is damaged or cut short: save the posterior again")
    foreign = InputError(f"{path} is not a file that posterior.save wrote")
    with open(path, "rb") as file:
        if file.read(3) != b"CDF":
            raise foreign
    try:
        with netcdf_file(path, "r", mmap=False) as file:
            if getattr(file, "format", None) != FORMAT.encode():
                raise foreign
            version = int(vars(file)["format_version"])
            if version > VERSION:
                raise InputError(
                    f"{path} was saved by a newer pmd (format {version}, known up to {VERSION}): "
                    "upgrade with pip install -U particle-mirror-descent"
                )
            texts = {name: getattr(file, name).decode("ascii") for name in (*TEXTS, "checksum")}
            raw = {name: np.array(variable[...]) for name, variable in file.variables.items()}
        stored = texts.pop("checksum")
        kinds = from_json(texts["arrays"])
        arrays = {name: decode(raw.get(name), *kind) for name, kind in kinds.items()}
    except InputError:
        raise
    except Exception as error:  # a damaged header can make the reader fail in any way
        raise damaged from error
    if checksum(arrays, texts) != stored:
        raise damaged
    return texts, arrays


def decode(raw: np.ndarray | None, kind: str, shape: list[int]) -> np.ndarray:
    """An array as it was before `write`."""
    data = b"" if raw is None else np.ascontiguousarray(raw, raw.dtype.newbyteorder("=")).tobytes()
    if kind == "text":
        return np.array(data.decode())
    return np.frombuffer(data, kind).reshape(shape).copy()


def checksum(arrays: dict[str, np.ndarray], texts: dict[str, str]) -> str:
    """CRC-32 of all texts and arrays."""
    value = 0
    for name in sorted(texts):
        value = zlib.crc32(texts[name].encode(), value)
    for name in sorted(arrays):
        array = arrays[name]
        data = str(array).encode() if array.dtype.kind == "U" else array.tobytes()
        value = zlib.crc32(data, value)
    return f"{value:08x}"


def to_json(value: Any) -> str:
    """Strict JSON; nan and infinities as {"float": "nan"}, NumPy and JAX scalars as numbers."""
    return json.dumps(portable(value), allow_nan=False)


def portable(value: Any) -> Any:
    """A value in the types that strict JSON has."""
    if isinstance(value, dict):
        return {str(key): portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(float(value))}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "tolist"):
        return portable(value.tolist())
    raise InputError(f"history and settings must hold numbers and texts to be saved, got {value!r}")


def from_json(text: str) -> Any:
    """What `to_json` wrote."""
    return json.loads(
        text, object_hook=lambda item: float(item["float"]) if [*item] == ["float"] else item
    )
