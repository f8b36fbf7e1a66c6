"""Training. The folder is called as the function is, so it can be called: `ms.train(...)` is `train.run.train(...)`."""

import sys
from types import ModuleType


class _Train(ModuleType):
    """Importing a folder sets its name in the package above, over what the public door would give."""

    def __call__(self, *args: object, **settings: object) -> object:
        from millstream.train.run import train

        return train(*args, **settings)  # pyright: ignore[reportArgumentType]


sys.modules[__name__].__class__ = _Train
