"""Detectors of one's own: `model=package.module:Class`."""

from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import signature
from typing import cast

from millstream.errors import BadSetting, NoDetector
from millstream.traces.detectors.logistic import Detector
from millstream.training.task import FitResources


def own_detector(name: str) -> Callable[[FitResources], Detector]:
    """The class or function that `package.module:Class` names."""
    module, _, attribute = name.partition(":")
    try:
        found: object = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:  # the last: no module
        raise BadSetting(f"model={name}: cannot be imported ({error})") from None
    try:
        signature(cast("Callable[..., object]", found)).bind(None)
    except TypeError as error:  # not callable, or with other arguments
        raise BadSetting(f"model={name}: must be constructed as {attribute}(resources), but {error}") from None
    return cast("Callable[[FitResources], Detector]", found)


def checked_fields(detector: Detector, field_names: Sequence[str]) -> Detector:
    """The detector; NoDetector if the store lacks a field of it."""
    if lacking := [name for name in ("fields", "fit", "score") if not hasattr(detector, name)]:
        raise BadSetting(f"{type(detector).__name__} is no detector: it has no {', '.join(lacking)}")
    missing = [field for field in detector.fields if field.split("[")[0] not in field_names]
    if missing:
        raise NoDetector(f"the store has no {', '.join(missing)}")
    return detector
