"""Names of detectors -> detectors: nets, baselines, groups of them, and classes of the user's own."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import cast

from millstream.errors import BadSetting, NoDetector
from millstream.model.baselines import BASELINES
from millstream.model.detector import Detector, Means
from millstream.model.zoo import NETS, NULLS, Recipe, build_net, net_features
from millstream.train.settings import TrainSettings
from millstream.train.study import Built
from millstream.train.task import DETECTION
from millstream.train.trained import Kit, NetModel, Workplace

GROUP = "baselines"


@dataclass(frozen=True)
class AskedDetector:
    """A detector that was named, for records with these fields."""

    name: str
    field_names: Sequence[str]

    @property
    def by_gradients(self) -> bool:
        """Whether it is a net: trained by all processes, once for every seed."""
        return self.name in NETS

    def build(self, *, means: Means, place: Workplace, folder: Path | None = None) -> Built:
        field_names = self.field_names
        if self.name in NETS:
            recipe = recipe_of(cast(TrainSettings, place.settings))
            kit = Kit(net_features(self.name, field_names, recipe), partial(build_net, self.name, recipe=recipe))
            net = NetModel(self.name, kit, task=DETECTION, means=means, place=place, folder=folder)
            return Built(net, NETS[self.name].title, NETS[self.name].kind)
        if ":" in self.name:
            detector = _own(self.name)(means)
            return Built(_checked(detector, field_names), self.name, "trained")
        baseline = BASELINES[self.name]
        detector = _checked(baseline.make(means, field_names), field_names)
        return Built(detector, baseline.title, "baseline", baseline.extra_forwards)


def asked_for(settings: TrainSettings, field_names: Sequence[str]) -> list[AskedDetector]:
    """The detectors named by `model=`."""
    found = expanded([name.strip() for name in settings.model.split(",") if name.strip()])
    for name in found:
        if ":" in name:
            _own(name)
        elif name not in NETS and name not in BASELINES:
            known = [*NETS, *BASELINES, GROUP]
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(known)}, or package.module:Class"
            raise BadSetting(f"model={name}: no such detector; {hint}")
    if not found:
        raise BadSetting("model=: name at least one detector")
    return [AskedDetector(name, field_names) for name in found]


def expanded(names: Sequence[str]) -> list[str]:
    """Each once; in the place of `baselines` all there are, and the null graphs of the models named."""
    nulls = [null for model in names for null in NULLS.get(model, ())]
    group = [*BASELINES, "charm", *nulls]
    return list(dict.fromkeys(one for name in names for one in (group if name == GROUP else [name])))


def recipe_of(settings: TrainSettings) -> Recipe:
    return Recipe(**{field.name: getattr(settings, field.name) for field in fields(Recipe)})


def _own(name: str) -> Callable[[Means], Detector]:
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadSetting(f"model={name}: cannot be imported ({error})") from None


def _checked(detector: Detector, field_names: Sequence[str]) -> Detector:
    missing = [field for field in detector.fields if field.split("[")[0] not in field_names]
    if missing:
        raise NoDetector(f"the store has no {', '.join(missing)}")
    return detector
